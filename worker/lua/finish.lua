-- End a job: result, registry, counters, time to live, and word to its client, all or nothing.
-- Args: prefix, id, execution, epoch, queue, worker, status ('finished' or 'failed'), result (flat fields),
--       ended (ISO), seconds worked, default ttl, client id or false, context fields (flat).
-- Returns {1 | 0 (lost), number of dependents}. A repeated call, after a lost reply, changes nothing and returns 1.
local _, id, execution, epoch, queue, worker, status, result, ended, seconds, default_ttl, client, fields = unpack(args)
local job = job_key(id)

if redis.call('HGET', job, 'batonq_ended_by') == execution then
  return {1, redis.call('SCARD', key('job', id, 'dependents'))}
end
if not owned(id, execution, epoch) then return {0, 0} end

local now = tonumber(redis.call('TIME')[1])
local ttl = tonumber(redis.call('HGET', job, status == 'finished' and 'result_ttl' or 'failure_ttl')) or default_ttl
drop_execution(id, execution, queue, worker)
redis.call('DEL', key('executions', id), tok_key(id))
redis.call('HSET', job, 'status', status, 'ended_at', ended, 'batonq_ended_by', execution)
redis.call('XADD', key('results', id), 'MAXLEN', 10, '*', unpack(result))
redis.call('HSET', ctx_key(id), unpack(fields))
redis.call('ZADD', key(status, queue), ttl < 0 and '+inf' or now + ttl, id)
for _, name in ipairs({job, key('results', id), ctx_key(id), key('job', id, 'dependents'), key('job', '', id, 'dependencies')}) do
  if ttl >= 0 then redis.call('EXPIRE', name, ttl) end
end
redis.call('HINCRBY', key('worker', worker), status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
redis.call('HINCRBYFLOAT', key('worker', worker), 'total_working_time', seconds)
if client then
  redis.call('RPUSH', key('batonq', 'done', client), id)
  redis.call('EXPIRE', key('batonq', 'done', client), ttl > 0 and ttl or default_ttl)
end
return {1, redis.call('SCARD', key('job', id, 'dependents'))}
