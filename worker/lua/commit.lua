-- Commit tokens, states and text of many jobs' contexts. Args: prefix, batch. The batch is one flat array, since this runs
-- many times a second: id, execution, epoch, number of contexts with news, and for each of them: context id, from, tokens,
-- and false or {log probabilities, fields of its hash (flat), stream entries}. `from` counts tokens before these.
-- Returns, flat, the place in the batch (from 0) of each job that was not committed, with 0 if it is lost, -1 if there is
-- a gap or contradiction (a bug).
-- A repeated commit, after a lost reply, finds its tokens there and changes nothing.
local _, batch = unpack(args)

local function fits(context, from, tokens, length)
  if from >= length or #tokens == 0 then return from <= length end
  local overlap = redis.call('GETRANGE', tok_key(context), from * 4, from * 4 + #tokens - 1)
  return string.sub(tokens, 1, #overlap) == overlap
end

local function write(id, context, from, tokens, length, more)
  local count = #tokens / 4
  if count > 0 then redis.call('SETRANGE', tok_key(context), from * 4, tokens) end
  if not more then return end
  local logprobs, fields, entries = unpack(more)
  if #logprobs > 0 then redis.call('SETRANGE', lp_key(context), from * (#logprobs / count), logprobs) end
  write_entries(context, length, entries)
  if #fields > 0 then redis.call('HSET', ctx_key(context), unpack(fields)) end
  if count > 0 then redis.call('HDEL', job_key(id), 'batonq_crashes', 'batonq_lapses') end
end

-- The contexts stand in the batch from `first` to `last`, four elements each.
local function commit(id, first, last)
  local lengths = {}
  for at = first, last, 4 do
    lengths[at] = committed_tokens(batch[at])
    if not fits(batch[at], batch[at + 1], batch[at + 2], lengths[at]) then return -1 end
  end
  for at = first, last, 4 do write(id, batch[at], batch[at + 1], batch[at + 2], lengths[at], batch[at + 3]) end
  return 1
end

local failed = {}
local at, place = 1, 0
while at <= #batch do
  local id, execution, epoch, contexts = batch[at], batch[at + 1], batch[at + 2], batch[at + 3]
  local outcome = owned(id, execution, epoch) and commit(id, at + 4, at + 3 + 4 * contexts) or 0
  if outcome ~= 1 then
    failed[#failed + 1] = place
    failed[#failed + 1] = outcome
  end
  at, place = at + 4 + 4 * contexts, place + 1
end
return failed
