-- Shared by the scripts that publish a stream: entries of text, and the mark of its end.
-- The longest stream; more than this is trimmed from its beginning, roughly.
local MAX_STREAM = 65536

-- Entries are {offset of the end in tokens, 0 for text or 1 for the end, fields (flat)}, in order. Those of text that the
-- server has already, `length` tokens of them, are left out: a commit whose reply was lost is repeated.
local function write_entries(context, length, entries)
  for _, entry in ipairs(entries) do
    local at, mark, fields = unpack(entry)
    if mark == 1 then
      end_stream(context, at, fields)
    elseif at > length then
      redis.call('XADD', stream_key(context), 'MAXLEN', '~', MAX_STREAM, string.format('%d-0', at), unpack(fields))
    end
  end
end
