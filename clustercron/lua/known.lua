-- Say what is known of a tick, and change nothing.
-- KEYS: job, ticks, runs, claim.
-- ARGV: tick in seconds.
-- Answers: Redis's clock, and the state of the tick's latest attempt, `gone` for a taken tick without a record, or ''.
-- Atomic, so that record and traces are of one instant.
local job, ticks, runs, claim = unpack(KEYS)
local record = redis.call('HGET', runs, ARGV[1])
if record then return {whole(now), word(record, 's')} end
return {whole(now), trace(job, ticks, claim, ARGV[1]) or ''}
