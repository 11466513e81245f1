-- Shared by every script: arguments, key names, and the fence.
-- One msgpack array comes in ARGV[1]; its first element is rq's key prefix.
local args = cmsgpack.unpack(ARGV[1])
local prefix = args[1]

local function key(...) return prefix .. ':' .. table.concat({...}, ':') end
local function job_key(id) return key('job', id) end
local function ctx_key(id) return key('batonq', 'ctx', id) end
local function tok_key(id) return key('batonq', 'tok', id) end

-- A job is owned by whoever holds both its execution id and its epoch: the epoch orders owners, the random id still
-- tells two of them apart if the hash was deleted and the epoch began again.
local function owned(id, execution, epoch)
  local held = redis.call('HMGET', job_key(id), 'status', 'batonq_execution', 'batonq_epoch')
  return held[1] == 'started' and held[2] == execution and tonumber(held[3]) == epoch
end

-- Forget an execution in all places where rq lists it.
local function drop_execution(id, execution, queue, worker)
  local member = id .. ':' .. execution
  redis.call('ZREM', key('wip', queue), member)
  redis.call('ZREM', key('executions', id), execution)
  redis.call('DEL', key('execution', id, execution))
  redis.call('SREM', key('worker', worker, 'executions'), member)
end
