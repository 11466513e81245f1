-- Commit tokens and states of many contexts. Args: prefix, batch of {id, execution, epoch, from, tokens, fields (flat)}.
-- `from` counts tokens before these. Returns for each: 1 committed, 0 lost, -1 gap or contradiction (a bug).
-- A repeated commit, after a lost reply, finds its tokens there and changes nothing.
local _, batch = unpack(args)
local committed = {}
for i, entry in ipairs(batch) do
  local id, execution, epoch, from, tokens, fields = unpack(entry)
  if not owned(id, execution, epoch) then
    committed[i] = 0
  else
    local at = from * 4
    local length = redis.call('STRLEN', tok_key(id))
    local overlap = redis.call('GETRANGE', tok_key(id), at, at + #tokens - 1)
    if at > length or string.sub(tokens, 1, #overlap) ~= overlap then
      committed[i] = -1
    else
      if #tokens > 0 then
        redis.call('SETRANGE', tok_key(id), at, tokens)
        redis.call('HDEL', job_key(id), 'batonq_crashes')
      end
      redis.call('HSET', ctx_key(id), 'token_count', math.max(length, at + #tokens) / 4, unpack(fields))
      committed[i] = 1
    end
  end
end
return committed
