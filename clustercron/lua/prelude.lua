-- Put before each script: Redis's clock, records, and the one way a tick becomes taken.
-- A record is text: `letter=value` pairs, separated by blanks; the letters are explained in schema.py.
-- An old version keeps the letters that it does not know.
local LAYOUT, KEPT_TICKS, MAX_TRIED = 1, 1024, 100

-- The number that a text is; 0 for what is none of ours. Anybody may have written to a record, and a script that stops
-- at what it finds there would leave half of what it has to write.
local function num(text)
  text = tostring(text)
  return string.match(text, '^%d+$') and #text <= 16 and tonumber(text) or 0
end

local time = redis.call('TIME')
local now = num(time[1]) * 1000 + math.floor(num(time[2]) / 1000)

local function whole(number) return string.format('%.0f', number) end

local function get(record, letter) return string.match(' ' .. record, ' ' .. letter .. '=(%S*)') end

-- What a record says, for an answer: whatever it is, it is short.
local function word(record, letter) return string.sub(get(record, letter) or 'unknown', 1, 100) end

local function drop(record, letters)
  for letter in string.gmatch(letters, '%S') do
    record = string.gsub(' ' .. record, ' ' .. letter .. '=%S*', '', 1)
    record = string.gsub(record, '^ ', '')
  end
  return record
end

local function put(record, letter, value)
  return drop(record, letter) .. ' ' .. letter .. '=' .. value
end

-- The ticks with an attempt that has not ended, in the job's state: what is running is seen without a search.
local function set_live(job, tick, alive)
  local rest = {}
  for other in string.gmatch(redis.call('HGET', job, 'live') or '', '%d+') do
    if other ~= tick then rest[#rest + 1] = other end
  end
  if alive then rest[#rest + 1] = tick end
  redis.call('HSET', job, 'live', table.concat(rest, ' '))
end

-- What is known of a tick without a record: nil when it is free, else why it counts as taken.
-- The claim key can be evicted or expire; the list of the last ticks and the newest tick have no expiry. Below a full
-- list only the claim key can tell.
local function trace(job, ticks, claim, tick)
  if redis.call('EXISTS', claim) == 1 or redis.call('LPOS', ticks, tick) then return 'gone' end
  local newest = redis.call('HGET', job, 'newest')
  if newest == tick then return 'gone' end
  if newest and num(tick) < num(newest) and redis.call('LLEN', ticks) == 0 then return 'gone' end
  return nil
end

-- Whether the list of the last ticks is full and begins after this tick.
local function below_list(ticks, tick)
  if redis.call('LLEN', ticks) < KEPT_TICKS then return false end
  return num(tick) < num(redis.call('LINDEX', ticks, 0))
end

-- Put a tick into the list of the last ones, which is sorted: seven bytes a tick, where a sorted set takes a hundred.
local function list_tick(ticks, tick)
  local last = redis.call('LINDEX', ticks, -1)
  if not last or num(last) < num(tick) then
    redis.call('RPUSH', ticks, tick)
  elseif not redis.call('LPOS', ticks, tick) then
    for _, other in ipairs(redis.call('LRANGE', ticks, 0, -1)) do
      if num(other) > num(tick) then
        redis.call('LINSERT', ticks, 'BEFORE', other, tick)
        break
      end
    end
  end
  redis.call('LTRIM', ticks, -KEPT_TICKS, -1)
end

-- Delete a few of the oldest records past the retention; the newest stays for ever.
local function trim(job, runs, recent, retention)
  for _ = 1, 4 do
    if redis.call('LLEN', recent) < 2 then return end
    local field = redis.call('LINDEX', recent, 0)
    local record = redis.call('HGET', runs, field)
    if record then
      local touched = math.max(num(get(record, 'c') or 0), num(get(record, 'l') or 0))
      if now - touched < retention then return end
      redis.call('HDEL', runs, field)
      set_live(job, field, false)
    end
    redis.call('LPOP', recent)
  end
end

-- Write a tick's latest attempt, and everything that says that the tick is taken. The record comes first: a user who may
-- not write all of it leaves a claim that lapses, and not a tick that counts as taken without a trace of whom.
local function take(job, ticks, runs, recent, claim, tick, owner, ttl, record)
  local fresh = redis.call('HEXISTS', runs, tick) == 0
  redis.call('HSET', runs, tick, record)
  if fresh then redis.call('RPUSH', recent, tick) end
  list_tick(ticks, tick)
  local newest = redis.call('HGET', job, 'newest')
  if not newest or num(newest) < num(tick) then redis.call('HSET', job, 'newest', tick) end
  if not redis.call('HGET', job, 'layout') then redis.call('HSET', job, 'layout', LAYOUT) end
  if not redis.call('SET', claim, owner, 'NX', 'PX', ttl) then redis.call('SET', claim, owner, 'PX', ttl) end
end

-- Put back the record of an attempt that Redis has lost; answers false when another owner has the tick by now.
local function put_back(job, ticks, runs, recent, claim, tick, owner, token, ttl, record)
  local holder = redis.call('GET', claim)
  if holder and holder ~= owner then return false end
  if num(redis.call('HGET', job, 'token')) < num(token) then redis.call('HSET', job, 'token', token) end
  take(job, ticks, runs, recent, claim, tick, owner, ttl, record)
  return true
end

-- Move an attempt that ended out of the way of the tick's next one.
local function archive(runs, recent, tick, record)
  local field = tick .. '.' .. (get(record, 'a') or '0')
  if redis.call('HEXISTS', runs, field) == 0 then redis.call('RPUSH', recent, field) end
  redis.call('HSET', runs, field, record)
end

-- A number that rises with every claim of the job, also when Redis lost its data in between.
local function draw_token(job)
  local token = math.max(now, num(redis.call('HGET', job, 'token') or 0) + 1)
  redis.call('HSET', job, 'token', whole(token))
  return whole(token)
end
