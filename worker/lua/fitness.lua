-- Shared by the scripts that decide who may carry a job on: what keeps this worker from it, or nil.
--   schema: its contexts were written by a newer version, which says that this one can't read them.
--   numerics: it has tokens that another arithmetic made; this one would go on with other bits.
-- `reader` is the major version of the context's hash that this worker reads.
local function unfit(id, numerics, reader)
  local contexts = contexts_of(id)
  local held = redis.call('HMGET', ctx_key(contexts[1]), 'min_reader', 'numerics')
  if tonumber(held[1] or 1) > reader then return 'schema' end
  if not held[2] or string.match(held[2], '[^,]*$') == numerics then return nil end
  if redis.call('HGET', job_key(id), 'batonq_any') == '1' then return nil end
  for _, context in ipairs(contexts) do
    if redis.call('STRLEN', tok_key(context)) > 0 then return 'numerics' end
  end
end
