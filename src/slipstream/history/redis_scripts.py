"""The scripts that run inside Redis, each one step for all clients.

Touch this with `redis_store`, which explains the keys. Redis' numbers are doubles: numbers of
behaviours stay below 2^53, and times, which are int64, are compared as text of equal length.
A member of the sorted set is `number:block`, so that equal blocks are different members.
"""

# KEYS: hash, blocks, users. ARGV: user; mode; the number expected (append, '' for any) or the first
# number (new, replace); earliest and latest time; kind of ids; a random name for a new user; keep;
# most actions; blocks to gather; milliseconds of Redis' clock after which nothing is done, or '';
# number of actions and their names; count and bytes of each block.
# Answers {outcome, value, whether to pack}.
APPEND = """
local meta, blocks, users = KEYS[1], KEYS[2], KEYS[3]
local mode, number = ARGV[2], ARGV[3]
local keep, most, tail, named = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]),
  tonumber(ARGV[12])
local function text(value) return string.format('%.0f', value) end
if ARGV[11] ~= '' then
  local now = redis.call('TIME')
  if tonumber(now[1]) * 1000 + tonumber(now[2]) / 1000 > tonumber(ARGV[11]) then
    return {'late', '0', '0'}
  end
end
if mode == 'new' and redis.call('EXISTS', meta) == 1 then return {'exists', '0', '0'} end
if mode == 'replace' then
  redis.call('DEL', meta, blocks)
  redis.call('ZREM', users, ARGV[1])
end
local stored = redis.call('HMGET', meta, 'first', 'total', 'time', 'kind', 'packed', 'small')
local begin = 0
if mode ~= 'append' then begin = tonumber(number) end
local first, total = tonumber(stored[1] or begin), tonumber(stored[2] or begin)
if mode == 'append' and number ~= '' and number ~= text(total) then
  return {'count', text(total), '0'}
end
if #ARGV == 12 + named then return {'ok', text(total), '0'} end
if stored[4] and stored[4] ~= ARGV[6] then return {'kind', stored[4], '0'} end
if stored[3] and ARGV[4] < stored[3] then return {'time', stored[3], '0'} end
local actions = tonumber(redis.call('HGET', meta, 'actions') or '0')
for place = 13, 12 + named do
  actions = actions + 1 - redis.call('HEXISTS', meta, 'action:' .. ARGV[place])
end
if actions > most then return {'actions', text(actions), '0'} end
for place = 13, 12 + named do redis.call('HSET', meta, 'action:' .. ARGV[place], '1') end
local packed, before = tonumber(stored[5] or begin), tonumber(stored[6] or '0')
local small = before
for place = 13 + named, #ARGV, 2 do
  redis.call('ZADD', blocks, text(total), text(total) .. ':' .. ARGV[place + 1])
  total, small = total + tonumber(ARGV[place]), small + 1
end
if total - first > keep then
  local oldest = redis.call('ZREVRANGEBYSCORE', blocks, text(total - keep), '-inf', 'WITHSCORES',
    'LIMIT', 0, 1)
  first = tonumber(oldest[2])
  redis.call('ZREMRANGEBYSCORE', blocks, '-inf', '(' .. text(first))
  packed = math.max(packed, first)
end
redis.call('HSETNX', meta, 'born', ARGV[7])
redis.call('HSET', meta, 'first', text(first), 'total', text(total), 'time', ARGV[5], 'kind',
  ARGV[6], 'packed', text(packed), 'small', text(small), 'actions', text(actions))
redis.call('ZADD', users, 0, ARGV[1])
local pack = math.floor(before / tail) < math.floor(small / tail)
return {'ok', text(total), pack and '1' or '0'}
"""

# KEYS: hash, blocks. ARGV: limit; since or ''. Answers {begin, total, block, …}, or nothing.
READ = """
local stored = redis.call('HMGET', KEYS[1], 'first', 'total')
if not stored[2] then return false end
local first, total = tonumber(stored[1]), tonumber(stored[2])
local begin = total - tonumber(ARGV[1])
if ARGV[2] ~= '' then begin = tonumber(ARGV[2]) end
begin = math.min(math.max(begin, first), total)
local function text(value) return string.format('%.0f', value) end
local oldest = redis.call('ZREVRANGEBYSCORE', KEYS[2], text(begin), '-inf', 'WITHSCORES',
  'LIMIT', 0, 1)
local later = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. text(tonumber(oldest[2])), '+inf')
local found = {text(begin), text(total), oldest[1]}
for place = 1, #later do found[place + 3] = later[place] end
return found
"""

# KEYS: hash, blocks, users. ARGV: user. Answers how many behaviours were deleted.
DELETE = """
local stored = redis.call('HMGET', KEYS[1], 'first', 'total')
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
if not stored[2] then return '0' end
return string.format('%.0f', tonumber(stored[2]) - tonumber(stored[1]))
"""

# KEYS: hash, blocks. Answers {born, packings so far, packed, total, block, …} of the blocks not
# packed yet.
READ_TAIL = """
local stored = redis.call('HMGET', KEYS[1], 'born', 'packings', 'packed', 'total')
if not stored[1] then return false end
local later = redis.call('ZRANGEBYSCORE', KEYS[2], stored[3], '+inf')
local found = {stored[1], stored[2] or '0', stored[3], stored[4]}
for place = 1, #later do found[place + 4] = later[place] end
return found
"""

# KEYS: hash, blocks. ARGV: born; packings so far; packed; number behind the packed blocks; where
# the next packing begins; then first number and bytes of each block. Does nothing if the user is
# another one, or the blocks are not those that were read: others packed or trimmed them.
PACK = """
local stored = redis.call('HMGET', KEYS[1], 'born', 'packings', 'packed')
if stored[1] ~= ARGV[1] or (stored[2] or '0') ~= ARGV[2] or stored[3] ~= ARGV[3] then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], ARGV[3], '(' .. ARGV[4])
for place = 6, #ARGV, 2 do
  redis.call('ZADD', KEYS[2], ARGV[place], ARGV[place] .. ':' .. ARGV[place + 1])
end
local small = redis.call('ZCOUNT', KEYS[2], ARGV[4], '+inf')
redis.call('HINCRBY', KEYS[1], 'packings', 1)
redis.call('HSET', KEYS[1], 'packed', ARGV[5], 'small', string.format('%.0f', small))
return 1
"""
