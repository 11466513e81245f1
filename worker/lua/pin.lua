-- Pin effective requests: write each context's hash anew and drop what belongs to another request.
-- Args: prefix, batch of {id, execution, epoch, streaming, contexts: {context id, fields (flat)}}.
-- Returns 1 or 0 (lost) for each.
local _, batch = unpack(args)
local pinned = {}
for i, entry in ipairs(batch) do
  local id, execution, epoch, streaming, contexts = unpack(entry)
  if owned(id, execution, epoch) then
    for _, old in ipairs(contexts_of(id)) do redis.call('DEL', ctx_key(old), tok_key(old), lp_key(old), stream_key(old)) end
    redis.call('HSET', job_key(id), 'batonq_n', #contexts, 'batonq_stream', streaming and 1 or 0)
    for _, context in ipairs(contexts) do redis.call('HSET', ctx_key(context[1]), unpack(context[2])) end
    pinned[i] = 1
  else
    pinned[i] = 0
  end
end
return pinned
