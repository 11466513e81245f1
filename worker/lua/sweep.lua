-- Look after one queue's jobs that wait outside its list. Args: prefix, queue, now (ISO), default ttl, most at once.
-- Jobs whose time has come go from rq's scheduled registry into the queue, or back behind their rate limit; canceled jobs
-- that rq has ended, without any time to live, get one, and leave the registry when it is over.
local _, queue, now_iso, default_ttl, most = unpack(args)
local now = tonumber(redis.call('TIME')[1])

local function enqueue(id, job)
  local held = redis.call('HMGET', job, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at')
  local front = held[1] == '1' or (held[2] == '1' and held[3] and held[3] ~= '')
  redis.call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso)
  redis.call(front and 'LPUSH' or 'RPUSH', key('queue', queue), id)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('scheduled', queue), 0, now, 'LIMIT', 0, most)) do
  local job = job_key(id)
  redis.call('ZREM', key('scheduled', queue), id)
  if redis.call('HGET', job, 'status') == 'scheduled' then
    local limit = redis.call('HGET', job, 'rate_limit_key')
    if limit and limit ~= '' then hold_back(id, limit, now) else enqueue(id, job) end
  end
end

-- Those canceled just now are left to whoever ran them.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('canceled', queue), 0, now - 60, 'LIMIT', 0, most)) do
  local status = redis.call('HGET', job_key(id), 'status')
  if status == 'canceled' and redis.call('TTL', job_key(id)) == -1 then
    settle_canceled(id, queue, false, default_ttl)
  else
    redis.call('ZREM', key('canceled', queue), id)
  end
end
