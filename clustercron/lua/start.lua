-- Turn a claimed tick into a running one: the last word before the command is executed.
-- KEYS: job, runs.
-- ARGV: owner, tick in seconds, fencing token, deadline, lease (ms).
-- Answers: `ok` and the instant of the start; or stale, lapsed (claim again), gone (no record: claim again), fenced with
--       the state and the node of the attempt that has the tick. Sent twice by one owner it answers the same twice.
-- Atomic, since a lapsed claim may be taken over at any instant: only one of the two gets `ok`.
local job, runs = unpack(KEYS)
local owner, tick, token, deadline, lease = unpack(ARGV)
local clock = whole(now)

if now > num(deadline) then return {'stale', clock} end
local record = redis.call('HGET', runs, tick)
if not record then return {'gone', clock} end
local state = get(record, 's')
if get(record, 'o') ~= owner or get(record, 'k') ~= token or (state ~= 'claimed' and state ~= 'running') then
  return {'fenced', clock, word(record, 's'), word(record, 'n')}
end
if state == 'claimed' and now > num(get(record, 'l') or 0) then return {'lapsed', clock} end
local began = get(record, 'b') or clock
record = put(put(put(record, 's', 'running'), 'b', began), 'l', whole(now + num(lease)))
redis.call('HSET', runs, tick, put(record, 'g', lease))
return {'ok', clock, began}
