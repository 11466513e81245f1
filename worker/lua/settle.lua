-- Clear away what lost ownerships have left. Args: prefix, worker, default ttl, batch of {id, execution, queue, context
-- ids, client id or false}. A job that rq's own cancel has ended gets what ours would have given it; one that was deleted
-- loses the rest; one that somebody else owns by now is let alone. Harmless when repeated.
local _, worker, default_ttl, batch = unpack(args)
for _, entry in ipairs(batch) do
  local id, execution, queue, contexts, client = unpack(entry)
  local held = redis.call('HMGET', job_key(id), 'status', 'batonq_execution')
  drop_execution(id, execution, queue, worker)
  if not held[1] then
    for _, context in ipairs(contexts) do
      redis.call('DEL', ctx_key(context), tok_key(context), lp_key(context), stream_key(context))
    end
  elseif held[1] == 'canceled' and held[2] == execution and redis.call('TTL', job_key(id)) == -1 then
    settle_canceled(id, queue, client, default_ttl)
  end
end
