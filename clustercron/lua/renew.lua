-- Say that a running attempt is alive.
-- KEYS: job, ticks, runs, recent, claim.
-- ARGV: owner, tick in seconds, fencing token, lease, time to live of the claim key (ms), record to restore.
-- Answers: `ok`; `restored` when Redis had lost the record and nobody else has the tick; `fenced` with the state and the
--       node of the attempt that has it.
-- Atomic, since a renewal must never revive an attempt that was taken over.
local job, ticks, runs, recent, claim = unpack(KEYS)
local owner, tick, token, lease, ttl, restore = unpack(ARGV)
local clock = whole(now)

local record = redis.call('HGET', runs, tick)
local answer = 'ok'
if not record then
  local holder = redis.call('GET', claim)
  if holder and holder ~= owner then return {'fenced', clock, 'gone', ''} end
  record = put(restore, 's', 'running')
  local highest = num(redis.call('HGET', job, 'token') or 0)
  if highest < num(token) then redis.call('HSET', job, 'token', token) end
  take(job, ticks, runs, recent, claim, tick, owner, ttl, record)
  set_live(job, tick, true)
  answer = 'restored'
elseif get(record, 'k') ~= token or get(record, 's') ~= 'running' then
  return {'fenced', clock, word(record, 's'), word(record, 'n')}
end
record = put(put(record, 'l', whole(now + num(lease))), 'g', lease)
redis.call('HSET', runs, tick, put(record, 'r', whole(num(get(record, 'r') or 0) + 1)))
return {answer, clock}
