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
  record = put(restore, 's', 'running')
  if not put_back(job, ticks, runs, recent, claim, tick, owner, token, ttl, record) then
    return {'fenced', clock, 'gone', ''}
  end
  set_live(job, tick, true)
  answer = 'restored'
elseif get(record, 'k') ~= token or get(record, 's') ~= 'running' then
  return {'fenced', clock, word(record, 's'), word(record, 'n')}
end
record = put(put(record, 'l', whole(now + num(lease))), 'g', lease)
redis.call('HSET', runs, tick, put(record, 'r', whole(num(get(record, 'r') or 0) + 1)))
return {answer, clock}
