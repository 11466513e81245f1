-- Take over the jobs of a worker whose lease has lapsed. Args: prefix, queue, worker, counter (what its lease in that queue
-- has been for a whole lease, or false: it has none), members (`job id:execution id` that are known to be its).
-- Does nothing if the counter has moved: the worker lives. Else its jobs go to the front of their queues, oldest claim
-- first, and their lapses are counted; returns their ids, or false.
local _, queue, worker, counter, members = unpack(args)
if redis.call('HGET', key('batonq', 'lease', queue), worker) ~= counter then return false end

for _, member in ipairs(redis.call('SMEMBERS', key('worker', worker, 'executions'))) do
  members[#members + 1] = member
end

local jobs = {}
for _, member in ipairs(members) do
  local id, execution = string.match(member, '^(.*):([^:]*)$')
  local held = redis.call('HMGET', job_key(id), 'status', 'batonq_execution', 'origin', 'started_at')
  if held[1] == 'started' and held[2] == execution then
    jobs[#jobs + 1] = {id = id, execution = execution, origin = held[3], since = held[4] or ''}
  end
end
table.sort(jobs, function(a, b) return a.since > b.since or (a.since == b.since and a.id > b.id) end)

local taken = {}
for _, job in ipairs(jobs) do
  if give_back(job.id, job.execution, job.origin, worker, 'lapsed') then
    redis.call('HINCRBY', job_key(job.id), 'batonq_lapses', 1)
    taken[#taken + 1] = job.id
  end
end
local served = redis.call('HGET', key('worker', worker), 'queues') or queue
for name in string.gmatch(served, '[^,]+') do redis.call('HDEL', key('batonq', 'lease', name), worker) end
redis.call('HDEL', key('batonq', 'lease', queue), worker)
return taken
