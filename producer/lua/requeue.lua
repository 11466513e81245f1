-- Send a dead job back to its queue, to begin anew. Args: prefix, id, now (ISO), now (Unix).
-- Returns its status before, or false if there is no such job; one that is neither failed nor stopped is left as it is,
-- so a repeated call changes nothing.
local _, id, now_iso, now = unpack(args)
local job = job_key(id)
local status, queue, limit, ended_by = unpack(redis.call('HMGET', job, 'status', 'origin', 'rate_limit_key',
                                                         'batonq_ended_by'))
if not status then return false end
if status ~= 'failed' and status ~= 'stopped' then return status end

note(id, 'requeued', '')
redis.call('ZREM', key('failed', queue), id)
redis.call('HDEL', job, 'batonq_crashes', 'batonq_lapses', 'batonq_execution', 'ended_at')
redis.call('HSET', job, 'worker_name', '')
for _, name in ipairs({job, key('results', id), key('job', id, 'dependents'), key('job', '', id, 'dependencies')}) do
  redis.call('PERSIST', name)
end
for _, context in ipairs(contexts_of(id)) do
  -- What it wrote before its end is not the beginning of what it will write. Its hash goes when it is claimed.
  if ended_by then redis.call('DEL', tok_key(context), lp_key(context), stream_key(context)) end
  for _, name in ipairs({ctx_key(context), tok_key(context), lp_key(context), stream_key(context)}) do
    redis.call('PERSIST', name)
  end
  show(context, 'WAITING')
end
if limit and limit ~= '' then
  hold_back(id, limit, now)
else
  redis.call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso)
  redis.call('RPUSH', key('queue', queue), id)
end
return status
