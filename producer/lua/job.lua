-- What every script begins with, the producer's and the worker's: arguments, key names, the fence, and how a job leaves.
-- One msgpack array comes in ARGV[1]; its first element is rq's key prefix.
local args = cmsgpack.unpack(ARGV[1])
local prefix = args[1]

local function key(...) return prefix .. ':' .. table.concat({...}, ':') end
local function job_key(id) return prefix .. ':job:' .. id end
local function ctx_key(context) return prefix .. ':batonq:ctx:' .. context end
local function tok_key(context) return prefix .. ':batonq:tok:' .. context end
local function lp_key(context) return prefix .. ':batonq:lp:' .. context end
local function stream_key(context) return prefix .. ':batonq:stream:' .. context end

-- Ids of a job's contexts, as far as the server knows of them.
local function contexts_of(id)
  local n = tonumber(redis.call('HGET', job_key(id), 'batonq_n') or 1) or 1
  if n == 1 then return {id} end
  local ids = {}
  for i = 1, n do ids[i] = id .. '.' .. (i - 1) end
  return ids
end

-- A job is owned by whoever holds both its execution id and its epoch: the epoch orders owners, the random id still
-- tells two of them apart if the hash was deleted and the epoch began again. `held` are its status, execution and epoch.
local function owns(held, execution, epoch)
  return held[1] == 'started' and held[2] == execution and tonumber(held[3]) == epoch
end

local function owned(id, execution, epoch)
  return owns(redis.call('HMGET', job_key(id), 'status', 'batonq_execution', 'batonq_epoch'), execution, epoch)
end

-- Take down in a job's history what happened to it: `{Unix time} {event} {worker or -} {epoch} {committed tokens}`, a line
-- for each event, the last HISTORY_BYTES of them. First claims and ends aren't among them: rq's fields tell of these.
local HISTORY_BYTES = 4096
local function note(id, event, worker)
  local job = job_key(id)
  local held = redis.call('HMGET', job, 'batonq_history', 'batonq_epoch')
  local now, tokens = redis.call('TIME'), 0
  for _, context in ipairs(contexts_of(id)) do tokens = tokens + redis.call('STRLEN', tok_key(context)) / 4 end
  local line = string.format('%d.%03d %s %s %s %d\n', now[1], now[2] / 1000, event, worker ~= '' and worker or '-',
                             held[2] or '0', tokens)
  local history = (held[1] or '') .. line
  if #history > HISTORY_BYTES then history = string.match(history, '\n(.*)$', #history - HISTORY_BYTES) end
  redis.call('HSET', job, 'batonq_history', history)
end

-- Forget an execution in all places where rq lists it.
local function drop_execution(id, execution, queue, worker)
  local member = id .. ':' .. execution
  redis.call('ZREM', key('wip', queue), member)
  redis.call('ZREM', key('executions', id), execution)
  redis.call('DEL', key('execution', id, execution))
  redis.call('SREM', key('worker', worker, 'executions'), member)
end

-- Let a job wait for a slot of its rate limit, as rq does.
local function hold_back(id, limit, now)
  redis.call('SADD', key('rl-keys'), limit)
  redis.call('HSET', key('rl', limit), 'concurrency', redis.call('HGET', job_key(id), 'rate_limit_concurrency'))
  redis.call('ZADD', key('rl', limit, 'rate_limited'), now, id)
  redis.call('HSET', job_key(id), 'status', 'rate_limited')
end

local function committed_tokens(context) return redis.call('STRLEN', tok_key(context)) / 4 end

-- Mark the end of a context's stream, once. The mark's id is {tokens}-1, after the last entry of text.
local function end_stream(context, tokens, fields)
  local id = string.format('%d-1', tokens)
  if #redis.call('XRANGE', stream_key(context), id, id) == 0 then
    redis.call('XADD', stream_key(context), id, unpack(fields))
  end
end

-- End the streams of a job that has no output, where its committed tokens end, or its last entry, whichever is later: a
-- job may fail because its tokens aren't what they were.
local function break_streams(id, code, message)
  if redis.call('HGET', job_key(id), 'batonq_stream') ~= '1' then return end
  for _, context in ipairs(contexts_of(id)) do
    local last = redis.call('XREVRANGE', stream_key(context), '+', '-', 'COUNT', 1)[1]
    local shown = last and tonumber(string.match(last[1], '^%d+')) or 0
    end_stream(context, math.max(math.floor(committed_tokens(context)), shown), {'error', code, 'message', message})
  end
end

-- Put an ended job into a registry, and give each key that it leaves behind its time to live, in seconds. As in rq,
-- 0 is at once and a negative one for ever.
local function retire(id, queue, registry, ttl)
  local names = {job_key(id), key('results', id), key('executions', id), key('job', id, 'dependents'),
                 key('job', '', id, 'dependencies')}
  for _, context in ipairs(contexts_of(id)) do
    redis.call('DEL', tok_key(context), lp_key(context))
    names[#names + 1] = ctx_key(context)
    names[#names + 1] = stream_key(context)
  end
  for _, name in ipairs(names) do
    if ttl == 0 then redis.call('DEL', name)
    elseif ttl > 0 then redis.call('EXPIRE', name, ttl)
    else redis.call('PERSIST', name) end
  end
  if ttl ~= 0 then
    local now = tonumber(redis.call('TIME')[1])
    redis.call('ZADD', key(registry, queue), ttl < 0 and '+inf' or now + ttl, id)
  end
end

-- Tell a client, if there is one, that a job of its has ended.
local function tell(client, id, ttl)
  if client then
    redis.call('RPUSH', key('batonq', 'done', client), id)
    redis.call('EXPIRE', key('batonq', 'done', client), ttl)
  end
end

-- Show in a context's hash, if there is one, what became of it.
local function show(context, state)
  if redis.call('EXISTS', ctx_key(context)) == 1 then
    redis.call('HSET', ctx_key(context), 'state', state, 'token_count', committed_tokens(context))
  end
end

-- What a canceled job leaves, whoever canceled it. Its status says so already.
local function settle_canceled(id, queue, client, default_ttl)
  local ttl = tonumber(redis.call('HGET', job_key(id), 'failure_ttl')) or default_ttl
  break_streams(id, 'job_canceled', 'the job was canceled')
  for _, context in ipairs(contexts_of(id)) do show(context, 'FINISHED') end
  retire(id, queue, 'canceled', ttl)
  tell(client, id, ttl > 0 and ttl or default_ttl)
end
