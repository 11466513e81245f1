-- Shared by the scripts that decide who may carry a job on: what keeps this worker from it, or nil.
--   schema: its contexts were written by a newer version, which says that this one can't read them.
--   weights, numerics: it has tokens that other weights or another arithmetic made; here they would go on otherwise.
-- `can` is {numerics, weights, major version of the context's hash that is read}.
local function unfit(id, can)
  local contexts = contexts_of(id)
  local held = redis.call('HMGET', ctx_key(contexts[1]), 'min_reader', 'numerics', 'weights')
  if (tonumber(held[1] or 1) or 1) > can[3] then return 'schema' end
  local numerics = held[2] and string.match(held[2], '[^,]*$') ~= can[1]
  local weights = held[3] and held[3] ~= can[2]
  if not numerics and not weights or redis.call('HGET', job_key(id), 'batonq_any') == '1' then return nil end
  for _, context in ipairs(contexts) do
    if redis.call('STRLEN', tok_key(context)) > 0 then return weights and 'weights' or 'numerics' end
  end
end
