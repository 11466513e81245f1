-- Bring back to the front of a queue what was set aside and can go on now. Args: prefix, queue, abilities (fitness.lua),
-- grace in seconds, most at once. After the grace a job that only prefers its own numerics goes on with any, and one of
-- other weights comes back to be failed.
-- Returns the ids of those that come back. Which ones are looked at is left to chance, so that none is starved.
local _, queue, can, grace, most = unpack(args)
local aside, now, back = key('batonq', 'aside', queue), tonumber(redis.call('TIME')[1]), {}
if redis.call('EXISTS', aside) == 0 then return back end
for _, id in ipairs(redis.call('ZRANDMEMBER', aside, most)) do
  local job, reason = job_key(id), nil
  if redis.call('HGET', job, 'status') == 'queued' then
    reason = unfit(id, can)
    local tolerant = redis.call('HGET', ctx_key(contexts_of(id)[1]), 'exact') ~= 'require'
    if (reason == 'weights' or reason == 'numerics' and tolerant) and now - tonumber(redis.call('ZSCORE', aside, id)) >= grace then
      redis.call('HSET', job, 'batonq_any', 1)
      reason = nil
    end
    if not reason then
      redis.call('LPUSH', key('queue', queue), id)
      back[#back + 1] = id
    end
  end
  if not reason then redis.call('ZREM', aside, id) end
end
return back
