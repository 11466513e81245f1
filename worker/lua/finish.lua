-- End jobs, each of them wholly: result, registry, counters, times to live, and word to its client.
-- Args: prefix, batch of {id, execution, epoch, queue, worker, status ('finished', 'failed' or 'stopped'), result (flat
-- fields), ended (ISO), seconds worked, default ttl, client id or false, contexts: {context id, tokens that the server has
-- acknowledged, fields (flat), stream entries}, what to tell the streams of a job without output: {code, message} or
-- false, whether to try again if rq's Retry leaves a try}.
-- Returns for each {1 | 0 (lost), 1 if it is queued again or waits for its next try, 1 if there is something to follow
-- up}, or an error, which concerns this job alone. A repeated call, after a lost reply, changes nothing and returns the
-- same.
local _, batch = unpack(args)
-- Seconds that a job which nobody wants to keep is kept for what has to follow.
local FOLLOW_UP_TTL = 600

-- As rq.job.Job.retry does. What was committed stays, and the next owner goes on from there.
local function try_again(id, execution, queue, worker, ended, left)
  local job = job_key(id)
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

local function count(worker, status, seconds)
  redis.call('HINCRBY', key('worker', worker), status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
  redis.call('HINCRBYFLOAT', key('worker', worker), 'total_working_time', seconds)
end

-- A server that came back older than it was has lost entries of a stream: they are made again before its end.
local function behind(contexts)
  for _, context in ipairs(contexts) do
    if #context[4] > 0 and committed_tokens(context[1]) < context[2] then return true end
  end
  return false
end

local function write_ends(contexts)
  for _, context in ipairs(contexts) do
    local name, _, fields, entries = unpack(context)
    if #entries > 0 then write_entries(name, committed_tokens(name), entries) end
    redis.call('HSET', ctx_key(name), unpack(fields))
  end
end

-- What is read of a job's hash, at once: this script takes more of the server's time than any other.
local FIELDS = {'status', 'batonq_execution', 'batonq_epoch', 'batonq_ended_by', 'batonq_retried_by', 'retries_left',
                'result_ttl', 'failure_ttl', 'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
                'webhooks', 'rate_limit_key'}
local FOLLOWED = 9  -- and those behind it

local function to_follow_up(id, held)
  for i = FOLLOWED, #FIELDS do
    if held[i] and held[i] ~= '' then return true end
  end
  return redis.call('SCARD', key('job', id, 'dependents')) > 0
end

local function finish(id, execution, epoch, queue, worker, status, result, ended, seconds, default_ttl, client, contexts,
                      broken, transient)
  local held = redis.call('HMGET', job_key(id), unpack(FIELDS))
  local ended_by, retried_by, retries_left, result_ttl, failure_ttl = unpack(held, 4, 8)
  if ended_by == execution then return {1, 0, redis.call('HEXISTS', key('batonq', 'followups', queue), id)} end
  if retried_by == execution then return {1, 1, 0} end
  if not owns(held, execution, epoch) then return {0, 0, 0} end
  if behind(contexts) then
    give_back(id, execution, queue, worker, 'behind')
    return {1, 1, 0}
  end

  drop_execution(id, execution, queue, worker)
  count(worker, status, seconds)
  local left = tonumber(retries_left or 0)
  if transient and left > 0 then
    try_again(id, execution, queue, worker, ended, left)
    return {1, 1, 0}
  end

  write_ends(contexts)
  if broken then break_streams(id, unpack(broken)) end
  redis.call('HSET', job_key(id), 'status', status, 'ended_at', ended, 'batonq_ended_by', execution)
  redis.call('XADD', key('results', id), 'MAXLEN', 10, '*', unpack(result))
  local ttl = tonumber(status == 'finished' and result_ttl or failure_ttl) or default_ttl
  tell(client, id, ttl > 0 and ttl or default_ttl)
  local more = to_follow_up(id, held)
  if more then
    redis.call('HSET', key('batonq', 'followups', queue), id, worker)
    if ttl == 0 then ttl = FOLLOW_UP_TTL end
  end
  retire(id, queue, status == 'finished' and 'finished' or 'failed', ttl)
  return {1, 0, more and 1 or 0}
end

local outcomes = {}
for i, ending in ipairs(batch) do
  local done, outcome = pcall(finish, unpack(ending))
  if not done then outcome = redis.error_reply(type(outcome) == 'table' and outcome.err or outcome) end
  outcomes[i] = outcome
end
return outcomes
