-- End a job: result, registry, counters, times to live, and word to its client, all or nothing.
-- Args: prefix, id, execution, epoch, queue, worker, status ('finished', 'failed' or 'stopped'), result (flat fields),
--       ended (ISO), seconds worked, default ttl, client id or false, contexts: {context id, tokens that the server
--       has acknowledged, fields (flat), stream entries}, what to tell the streams of a job without output: {code, message} or false, whether to try again if
--       rq's Retry leaves a try.
-- Returns {1 | 0 (lost), 1 if it is queued again or waits for its next try, 1 if there is something to follow up}.
-- A repeated call, after a lost reply, changes nothing and returns the same.
local _, id, execution, epoch, queue, worker, status, result, ended, seconds, default_ttl, client, contexts, broken,
      transient = unpack(args)
local job = job_key(id)
-- Seconds that a job which nobody wants to keep is kept for what has to follow.
local FOLLOW_UP_TTL = 600

local function follow_up()
  local wanted = redis.call('HMGET', job, 'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
                            'webhooks', 'rate_limit_key')
  for i = 1, 5 do
    if wanted[i] and wanted[i] ~= '' then return true end
  end
  return redis.call('SCARD', key('job', id, 'dependents')) > 0
end

-- As rq.job.Job.retry does. What was committed stays, and the next owner goes on from there.
local function try_again(left)
  note(id, 'retried', worker)
  local intervals = cjson.decode(redis.call('HGET', job, 'retry_intervals') or '[]')
  local interval = intervals[math.max(#intervals - left, 0) + 1] or 0
  redis.call('HSET', job, 'retries_left', left - 1, 'worker_name', '', 'ended_at', ended, 'batonq_retried_by', execution)
  redis.call('HDEL', job, 'batonq_execution', 'batonq_crashes', 'batonq_lapses')
  for _, context in ipairs(contexts_of(id)) do show(context, 'PREEMPTED') end
  if interval > 0 then
    redis.call('HSET', job, 'status', 'scheduled')
    redis.call('ZADD', key('scheduled', queue), tonumber(redis.call('TIME')[1]) + interval, id)
  else
    local front = redis.call('HGET', job, 'enqueue_at_front_on_retry') == '1'
    redis.call('HSET', job, 'status', 'queued', 'enqueued_at', ended)
    redis.call(front and 'LPUSH' or 'RPUSH', key('queue', queue), id)
  end
end

local function count()
  redis.call('HINCRBY', key('worker', worker), status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
  redis.call('HINCRBYFLOAT', key('worker', worker), 'total_working_time', seconds)
end

local past = redis.call('HMGET', job, 'batonq_ended_by', 'batonq_retried_by')
if past[1] == execution then return {1, 0, redis.call('HEXISTS', key('batonq', 'followups', queue), id)} end
if past[2] == execution then return {1, 1, 0} end
if not owned(id, execution, epoch) then return {0, 0, 0} end

-- A server that came back older than it was has lost entries of a stream: they are made again before its end.
for _, context in ipairs(contexts) do
  if #context[4] > 0 and committed_tokens(context[1]) < context[2] then
    give_back(id, execution, queue, worker, 'behind')
    return {1, 1, 0}
  end
end

drop_execution(id, execution, queue, worker)
count()
local left = tonumber(redis.call('HGET', job, 'retries_left') or 0)
if transient and left > 0 then
  try_again(left)
  return {1, 1, 0}
end

for _, context in ipairs(contexts) do
  write_entries(context[1], committed_tokens(context[1]), context[4])
  redis.call('HSET', ctx_key(context[1]), unpack(context[3]))
end
if broken then break_streams(id, unpack(broken)) end
redis.call('HSET', job, 'status', status, 'ended_at', ended, 'batonq_ended_by', execution)
redis.call('XADD', key('results', id), 'MAXLEN', 10, '*', unpack(result))
local ttl = tonumber(redis.call('HGET', job, status == 'finished' and 'result_ttl' or 'failure_ttl')) or default_ttl
tell(client, id, ttl > 0 and ttl or default_ttl)
local more = follow_up()
if more then
  redis.call('HSET', key('batonq', 'followups', queue), id, worker)
  if ttl == 0 then ttl = FOLLOW_UP_TTL end
end
retire(id, queue, status == 'finished' and 'finished' or 'failed', ttl)
return {1, 0, more and 1 or 0}
