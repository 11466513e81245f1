-- Take up to n queued jobs. Args: prefix, queue, worker, execution ids (n of them), now (ISO), now (Unix), ttl.
-- Returns, for each: {id, execution, epoch, job hash, context hash, committed tokens}.
-- An id whose job is gone, cancelled, done or running is dropped: a queue may hold an id twice.
local _, queue, worker, executions, now_iso, now, ttl = unpack(args)
local claimed = {}
if redis.call('EXISTS', key('suspended')) == 1 then return claimed end

for _, execution in ipairs(executions) do
  local id
  repeat
    id = redis.call('LPOP', key('queue', queue))
  until not id or redis.call('HGET', job_key(id), 'status') == 'queued'
  if not id then break end

  local job, ctx = job_key(id), ctx_key(id)
  local epoch = redis.call('HINCRBY', job, 'batonq_epoch', 1)
  redis.call('HSET', job, 'status', 'started', 'started_at', now_iso, 'last_heartbeat', now_iso,
             'worker_name', worker, 'batonq_execution', execution)
  redis.call('PERSIST', job)
  -- rq's default description is the call with all its arguments: a prompt in plain sight of every dashboard.
  local description = redis.call('HGET', job, 'description')
  if description and string.sub(description, 1, 13) == 'batonq.worker' then
    redis.call('HSET', job, 'description', 'generate')
  end

  local member = id .. ':' .. execution
  redis.call('HSET', key('execution', id, execution), 'id', execution, 'job_id', id, 'created_at', now,
             'last_heartbeat', now, 'worker_name', worker)
  redis.call('EXPIRE', key('execution', id, execution), ttl)
  redis.call('ZADD', key('executions', id), now + ttl, execution)
  redis.call('EXPIRE', key('executions', id), ttl)
  -- With any finite score rq's own registry cleanup would one day move a running job to failed.
  redis.call('ZADD', key('wip', queue), '+inf', member)
  redis.call('SADD', key('worker', worker, 'executions'), member)

  claimed[#claimed + 1] = {id, execution, epoch, redis.call('HGETALL', job), redis.call('HGETALL', ctx),
                           redis.call('GET', tok_key(id)) or ''}
end
if #claimed > 0 then redis.call('HSET', key('worker', worker), 'state', 'busy') end
return claimed
