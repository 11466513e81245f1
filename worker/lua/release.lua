-- Give owned jobs back to the front of their queues, in the order given. Spends no retry.
-- Args: prefix, worker, crashed (true: the engine died while it held them), batch of {id, execution, epoch}.
-- Returns 1 or 0 (lost) for each.
local _, worker, crashed, batch = unpack(args)
local released = {}
for i = #batch, 1, -1 do
  local id, execution, epoch = unpack(batch[i])
  if owned(id, execution, epoch) then
    local job = job_key(id)
    local queue = redis.call('HGET', job, 'origin')
    drop_execution(id, execution, queue, worker)
    redis.call('HSET', job, 'status', 'queued', 'worker_name', '')
    redis.call('HDEL', job, 'batonq_execution')
    note(id, crashed and 'crashed' or 'released', worker)
    if crashed then redis.call('HINCRBY', job, 'batonq_crashes', 1) end
    for _, context in ipairs(contexts_of(id)) do show(context, 'PREEMPTED') end
    redis.call('LPUSH', key('queue', queue), id)
    released[i] = 1
  else
    released[i] = 0
  end
end
return released
