-- Record the end of an attempt; by choice begin the tick's next one, for a retry by the same owner.
-- KEYS: job, ticks, runs, recent, claim, output (of this attempt).
-- ARGV: owner, tick in seconds, fencing token ('' for a run without a claim), outcome, what the record says of the end,
--       age of the end, how long claim and output are kept (ms), record to restore, kept output, lease of the next
--       attempt (ms, '' for none), deadline of a request for one.
-- Answers: `ok`, and with a next attempt its fencing token and number; `stale` for a next attempt past the deadline;
--       `fenced` with the state and the node of the attempt that has the tick: nothing was changed. Sent twice it answers
--       the same twice.
-- Atomic, since an attempt that was taken over must not overwrite its successor.
local job, ticks, runs, recent, claim, output = unpack(KEYS)
local owner, tick, token, outcome, ending, age, ttl, restore, kept, lease, deadline = unpack(ARGV)
local clock = whole(now)

if lease ~= '' and now > num(deadline) then return {'stale', clock} end

local record = redis.call('HGET', runs, tick)
if token == '' then
  -- A run without a claim is kept beside whatever the tick came to otherwise.
  local ended = put(restore, 's', outcome) .. ' e=' .. whole(now - num(age)) .. ' ' .. ending
  if not record and not trace(job, ticks, claim, tick) then
    take(job, ticks, runs, recent, claim, tick, owner, ttl, ended)
  else
    local field = tick .. '.' .. owner
    if redis.call('HEXISTS', runs, field) == 0 then redis.call('RPUSH', recent, field) end
    redis.call('HSET', runs, field, ended)
  end
  return {'ok', clock}
end
if not record then
  record = restore
  if not put_back(job, ticks, runs, recent, claim, tick, owner, token, ttl, record) then
    return {'fenced', clock, 'gone', ''}
  end
elseif get(record, 'k') ~= token then
  -- The answer to a retry's request may have been lost: then the next attempt is ours already.
  local field = tick .. '.' .. whole(num(get(record, 'a') or 1) - 1)
  local before = redis.call('HGET', runs, field)
  if not (get(record, 'o') == owner and before and get(before, 'k') == token) then
    return {'fenced', clock, word(record, 's'), word(record, 'n')}
  end
  if lease ~= '' then return {'ok', get(record, 'b'), get(record, 'k'), get(record, 'a')} end
  -- Its owner never heard of it, and so executed nothing: who has a next attempt ends that one. It is taken back.
  redis.call('HSET', runs, tick, before)
  redis.call('HDEL', runs, field)
  record = before
end

local state = get(record, 's')
-- An end that is recorded is the last word: a request for a next attempt that comes behind it was overtaken.
if state == 'claimed' or state == 'running' or (state == outcome and lease == '') then
  local ended = put(record, 's', outcome)
  if not get(record, 'e') then ended = put(ended, 'e', whole(now - num(age))) .. ' ' .. ending end
  ended = drop(ended, 'olrg')
  if kept ~= '' then redis.call('SET', output, kept, 'PX', ttl) end
  if lease ~= '' then
    archive(runs, recent, tick, ended)
    local attempt = whole(num(get(record, 'a') or 1) + 1)
    token = draw_token(job)
    record = put(put(put(drop(record, 'rt'), 'a', attempt), 'k', token), 'c', clock)
    record = put(put(record, 's', 'running'), 'b', clock)
    redis.call('HSET', runs, tick, put(put(record, 'l', whole(now + num(lease))), 'g', lease))
    return {'ok', clock, token, attempt}
  end
  redis.call('HSET', runs, tick, ended)
  -- A tick that was given back is taken by nobody: it stays among those that are to be looked at.
  if outcome ~= 'abandoned' then set_live(job, tick, false) end
  return {'ok', clock}
end
return {'fenced', clock, word(record, 's'), word(record, 'n')}
