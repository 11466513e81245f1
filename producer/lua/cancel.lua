-- Cancel a job wherever it is, in constant time. Args: prefix, id, client id or false, now (ISO), default ttl.
-- Returns its status before, or false if there is no such job; one that had ended is left as it is.
-- A queued id stays in its list: claiming drops it. A running one is taken from its owner here and now, so that nothing
-- of it is published any more; its owner finds that out at its next commit.
local _, id, client, now_iso, default_ttl = unpack(args)
local job = job_key(id)
local held = redis.call('HMGET', job, 'status', 'origin', 'batonq_execution', 'worker_name')
local status, queue, execution, worker = unpack(held)
if not status then return false end
if status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled' then return status end

if status == 'started' and execution then drop_execution(id, execution, queue, worker or '') end
note(id, 'canceled', worker or '')
for _, registry in ipairs({'scheduled', 'deferred', 'ready'}) do redis.call('ZREM', key(registry, queue), id) end
redis.call('HSET', job, 'status', 'canceled', 'ended_at', now_iso)
settle_canceled(id, queue, client, default_ttl)
return status
