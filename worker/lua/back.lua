-- Shared by the scripts that give a running job back.

-- To the front of its queue, where another worker carries it on.
local function give_back(id, execution, queue, worker, event)
  local job = job_key(id)
  if redis.call('HGET', job, 'batonq_execution') ~= execution then return false end -- the same one twice
  note(id, event, worker)
  drop_execution(id, execution, queue, worker)
  redis.call('HSET', job, 'status', 'queued', 'worker_name', '')
  redis.call('HDEL', job, 'batonq_execution')
  for _, context in ipairs(contexts_of(id)) do show(context, 'PREEMPTED') end
  redis.call('LPUSH', key('queue', queue), id)
  return true
end
