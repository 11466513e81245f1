-- Pin effective requests: write each context's hash anew and drop tokens that belong to another request.
-- Args: prefix, batch of {id, execution, epoch, fields (flat)}. Returns 1 or 0 (lost) for each.
local _, batch = unpack(args)
local pinned = {}
for i, entry in ipairs(batch) do
  local id, execution, epoch, fields = unpack(entry)
  if owned(id, execution, epoch) then
    redis.call('DEL', ctx_key(id), tok_key(id))
    redis.call('HSET', ctx_key(id), unpack(fields))
    pinned[i] = 1
  else
    pinned[i] = 0
  end
end
return pinned
