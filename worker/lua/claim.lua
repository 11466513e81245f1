-- Take up to n queued jobs, from the first of the queues that has any, in order.
-- Args: prefix, queues, worker, execution ids (n of them), now (ISO), now (Unix), ttl, abilities (fitness.lua).
-- Returns false while rq is suspended; else {jobs, aside}. For each job {id, execution, epoch, queue, job hash, contexts},
-- where contexts are what earlier owners left: {context hash, committed tokens, their log probabilities}. Aside are jobs
-- that this worker can't carry on, {id, why}: they leave the queue until somebody recalls them.
-- An id whose job is gone, canceled, done or running is dropped: a queue may hold an id twice.
local _, queues, worker, executions, now_iso, now, ttl, can = unpack(args)
if redis.call('EXISTS', key('suspended')) == 1 then return false end

local aside = {}

-- What matters of a job that is to be claimed: {epoch, whether it is fresh, description}; nil if it is not. One that this
-- worker can't carry on is set aside. Of a job that has ended and was queued again, nothing of before counts any more. One
-- that is fresh was never claimed nor ended in any way: it has left nothing anywhere.
local function wanted(id, queue)
  local held = redis.call('HMGET', job_key(id), 'status', 'batonq_ended_by', 'batonq_epoch', 'ended_at', 'description')
  if held[1] ~= 'queued' then return nil end
  local fresh = not held[3] and (not held[4] or held[4] == '')
  local reason = not fresh and not held[2] and unfit(id, can)
  if not reason then return {tonumber(held[3] or 0), fresh, held[5] or ''} end
  redis.call('ZADD', key('batonq', 'aside', queue), redis.call('TIME')[1], id)
  aside[#aside + 1] = {id, reason}
end

local function pop()
  for _, queue in ipairs(queues) do
    local id, job
    repeat
      id = redis.call('LPOP', key('queue', queue))
      job = id and wanted(id, queue)
    until not id or job
    if id then return id, queue, unpack(job) end
  end
end

-- What earlier owners left of a job's contexts. Of a job that has ended and was queued again, nothing counts any more.
local function mirrors(id, fresh)
  if fresh then return {{{}, '', ''}} end
  local found = {}
  local anew = redis.call('HDEL', job_key(id), 'batonq_ended_by') == 1
  for i, context in ipairs(contexts_of(id)) do
    local names = {ctx_key(context), tok_key(context), lp_key(context), stream_key(context)}
    if anew then redis.call('DEL', unpack(names)) end
    for _, name in ipairs(names) do redis.call('PERSIST', name) end
    found[i] = {redis.call('HGETALL', names[1]), redis.call('GET', names[2]) or '', redis.call('GET', names[3]) or ''}
  end
  return found
end

local claimed = {}
for _, execution in ipairs(executions) do
  local id, queue, epoch, fresh, description = pop()
  if not id then break end

  local job = job_key(id)
  epoch = epoch + 1
  redis.call('HSET', job, 'status', 'started', 'started_at', now_iso, 'last_heartbeat', now_iso,
             'worker_name', worker, 'origin', queue, 'batonq_execution', execution, 'batonq_epoch', epoch)
  if not fresh then
    redis.call('HDEL', job, 'batonq_any')
    for _, name in ipairs({job, key('results', id), key('job', id, 'dependents'), key('job', '', id, 'dependencies')}) do
      redis.call('PERSIST', name)
    end
    for _, registry in ipairs({'finished', 'failed', 'canceled'}) do redis.call('ZREM', key(registry, queue), id) end
  end
  redis.call('ZREM', key('scheduled', queue), id)
  if epoch > 1 then note(id, 'claimed', worker) end
  -- rq's default description is the call with all its arguments: a prompt in plain sight of every dashboard.
  if string.sub(description, 1, 13) == 'batonq.worker' then
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

  claimed[#claimed + 1] = {id, execution, epoch, queue, redis.call('HGETALL', job), mirrors(id, fresh)}
end
return {claimed, aside}
