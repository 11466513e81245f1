-- Commit tokens, states and text of many jobs' contexts. Args: prefix, batch of {id, execution, epoch, contexts}, where
-- contexts are {context id, from, tokens, log probabilities, fields (flat), stream entries} of those that changed.
-- `from` counts tokens before these. Returns for each: 1 committed, 0 lost, -1 gap or contradiction (a bug).
-- A repeated commit, after a lost reply, finds its tokens there and changes nothing.
local _, batch = unpack(args)

local function fits(context)
  local id, from, tokens = unpack(context)
  local overlap = redis.call('GETRANGE', tok_key(id), from * 4, from * 4 + #tokens - 1)
  return from <= committed_tokens(id) and string.sub(tokens, 1, #overlap) == overlap
end

local function write(context)
  local id, from, tokens, logprobs, fields, entries = unpack(context)
  local length = committed_tokens(id)
  local count = #tokens / 4
  if count > 0 then
    redis.call('SETRANGE', tok_key(id), from * 4, tokens)
    if #logprobs > 0 then redis.call('SETRANGE', lp_key(id), from * (#logprobs / count), logprobs) end
  end
  write_entries(id, length, entries)
  redis.call('HSET', ctx_key(id), 'token_count', math.max(length, from + count), unpack(fields))
  return count
end

local function commit(id, contexts)
  for _, context in ipairs(contexts) do
    if not fits(context) then return -1 end
  end
  local count = 0
  for _, context in ipairs(contexts) do count = count + write(context) end
  if count > 0 then redis.call('HDEL', job_key(id), 'batonq_crashes') end
  return 1
end

local committed = {}
for i, entry in ipairs(batch) do
  local id, execution, epoch, contexts = unpack(entry)
  committed[i] = owned(id, execution, epoch) and commit(id, contexts) or 0
end
return committed
