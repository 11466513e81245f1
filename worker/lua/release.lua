-- Give owned jobs back to the front of their queues, in the order given. Spends no retry.
-- Args: prefix, worker, batch of {id, execution, epoch, crashed (true: the engine died in a step that held it)}.
-- Returns 1 or 0 (lost) for each.
local _, worker, batch = unpack(args)
local released = {}
for i = #batch, 1, -1 do
  local id, execution, epoch, crashed = unpack(batch[i])
  released[i] = 0
  if owned(id, execution, epoch) then
    if crashed then redis.call('HINCRBY', job_key(id), 'batonq_crashes', 1) end
    local queue = redis.call('HGET', job_key(id), 'origin')
    give_back(id, execution, queue, worker, crashed and 'crashed' or 'released')
    released[i] = 1
  end
end
return released
