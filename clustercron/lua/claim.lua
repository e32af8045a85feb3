-- Claim one tick for one owner.
-- KEYS: job, ticks, runs, recent, nodes, claim (of this tick).
-- ARGV: owner, tick in seconds, node's clock, deadline, max skew, max age (0: none), lease, how long claim and
--       records are kept (all in ms), node's name, what the node says of itself, schedule|zone, fingerprint of the zone's
--       offsets, what the record says of the fire, fencing token that was watched for a whole lease or '', kind of fire.
-- Answers: status, Redis's clock, and with `won`: fencing token, attempt, `below` when only the claim key could tell;
--       with `lost`: state, node, fencing token, ms of lease left, claimed at, started at. Further statuses: stale, skew,
--       early, too-late, layout. Sent twice by one owner it answers the same twice.
-- Atomic, since clocks, state and claim must be seen at one instant: whoever looks first and claims later claims what
--       has been claimed in between.
local job, ticks, runs, recent, nodes, claim = unpack(KEYS)
local owner, tick, node_now, deadline, max_skew, max_age, lease, ttl, node, about, definition, rules, fire, watched,
  kind = unpack(ARGV)
local clock = whole(now)

local layout = redis.call('HGET', job, 'layout')
if layout and (num(layout) < 1 or num(layout) > LAYOUT) then return {'layout', clock, layout} end
if now > num(deadline) then return {'stale', clock} end
if math.abs(num(node_now) - now) > num(max_skew) then return {'skew', clock} end
local age = now - num(tick) * 1000
if age < 0 and kind == 'tick' then return {'early', clock} end

-- Each key is read before the first write: one of another type, found too late, would leave a claim without a record.
redis.call('LLEN', recent)

-- Who was here: each node keeps one entry, and a short number for the lists of who tried.
local seen = redis.call('HGET', nodes, node)
local number = seen and get(seen, 'i')
if not number then
  number = whole(redis.call('HINCRBY', job, 'nodes', 1))
  if redis.call('HLEN', nodes) >= 1000 then
    local all = redis.call('HGETALL', nodes)
    for i = 1, #all, 2 do
      if now - num(get(all[i + 1], 't') or 0) > num(ttl) then redis.call('HDEL', nodes, all[i]) end
    end
  end
end
redis.call('HSET', nodes, node,
  'i=' .. number .. ' t=' .. clock .. ' k=' .. whole(num(node_now) - now) .. ' ' .. about)

-- The schedules that were in force, a line each, newest last; and when nodes last disagreed. A fingerprint is of one
-- year: another year's says nothing.
local definitions = redis.call('HGET', job, 'definitions') or ''
local last = string.match(definitions, '([^\n]*)$')
local last_rules = redis.call('HGET', job, 'rules')
local differs = last ~= '' and string.match(last, '^%d+|(.*)$') ~= definition
if last_rules and last_rules ~= rules and string.sub(last_rules, 1, 4) == string.sub(rules, 1, 4) then differs = true end
if kind == 'tick' and last ~= '' then differs, definition, rules = false, string.match(last, '^%d+|(.*)$'), last_rules end
if differs then redis.call('HSET', job, 'differed', clock) end
if last == '' or string.match(last, '^%d+|(.*)$') ~= definition then
  local lines = {}
  for line in string.gmatch(definitions, '[^\n]+') do lines[#lines + 1] = line end
  lines[#lines + 1] = tick .. '|' .. definition
  redis.call('HSET', job, 'definitions', table.concat(lines, '\n', math.max(1, #lines - 31)))
end
-- How long a tick can still be claimed by a fire: until then it is due, and not missed.
if kind == 'fire' and redis.call('HGET', job, 'max_age') ~= max_age then redis.call('HSET', job, 'max_age', max_age) end
if rules and last_rules ~= rules then redis.call('HSET', job, 'rules', rules) end

-- A free tick can be early or late by Redis's clock; who has a taken one is told at once.
local untimely = age < 0 and 'early' or (num(max_age) > 0 and age > num(max_age) and 'too-late') or nil

local record = redis.call('HGET', runs, tick)
local attempt, tried = '1', nil
if record then
  local state = get(record, 's')
  if get(record, 'o') == owner and (state == 'claimed' or state == 'running') then
    -- A request that was long on its way must not shorten the lease of a run that its owner has begun meanwhile.
    local lease_until = math.max(now + num(lease), num(get(record, 'l') or 0))
    redis.call('HSET', runs, tick, put(record, 'l', whole(lease_until)))
    return {'won', clock, get(record, 'k'), get(record, 'a'), ''}
  end
  local lapsed = state == 'claimed' and (now > num(get(record, 'l') or 0) or get(record, 'k') == watched)
  if not (lapsed or state == 'abandoned' or state == 'start-failed') then
    tried = get(record, 't')
    if get(record, 'n') ~= node and not string.find(',' .. (tried or '') .. ',', ',' .. number .. ',', 1, true) then
      local _, others = string.gsub(tried or '', ',', '')
      if others < MAX_TRIED then
        redis.call('HSET', runs, tick, put(record, 't', tried and (tried .. ',' .. number) or number))
      end
    end
    return {'lost', clock, word(record, 's'), word(record, 'n'), word(record, 'k'),
      whole(num(get(record, 'l') or now) - now), whole(num(get(record, 'c'))), whole(num(get(record, 'b')))}
  end
  if untimely then return {untimely, clock} end
  attempt = get(record, 'a') or '1'
  tried = get(record, 't')
  if state == 'start-failed' then
    archive(runs, recent, tick, record)
    attempt, tried = whole(num(attempt) + 1), nil
  else
    -- Nothing was executed: the attempt goes on under its number, and its node is one of those who tried.
    local before = get(record, 'n') ~= node and get(redis.call('HGET', nodes, get(record, 'n') or '') or '', 'i')
    if before then tried = tried and (tried .. ',' .. before) or before end
  end
  -- Who asked before and wins now is not one of those who lost.
  local losers = {}
  for other in string.gmatch(tried or '', '%d+') do
    if other ~= number then losers[#losers + 1] = other end
  end
  tried = #losers > 0 and table.concat(losers, ',') or nil
else
  if trace(job, ticks, claim, tick) and redis.call('GET', claim) ~= owner then
    return {'lost', clock, 'gone', '', '', '0', '0', '0'}
  end
  if untimely then return {untimely, clock} end
end

local below = below_list(ticks, tick) and 'below' or ''
local token = draw_token(job)
record = 'a=' .. attempt .. ' s=claimed n=' .. node .. ' o=' .. owner .. ' k=' .. token .. ' c=' .. clock
  .. ' l=' .. whole(now + num(lease)) .. ' ' .. fire
if tried then record = put(record, 't', tried) end
take(job, ticks, runs, recent, claim, tick, owner, ttl, record)
set_live(job, tick, true)
if kind == 'fire' and not redis.call('HGET', job, 'known') then redis.call('HSET', job, 'known', clock) end
trim(job, runs, recent, num(ttl))
return {'won', clock, token, attempt, below}
