"""What a server does in one step, as it must be, or as one question for many keys.

Each script names its keys; all keys of one call lie on one node, but those of ``THERE``, ``CLAIM`` and ``TOUCH``, which
no cluster is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1

from kvstore.chunk import ENVELOPE_READER
from kvstore.keys import FORMAT_VERSION

HEADER_BYTES_MAX = 16 << 20
"""No script gives more of a header."""


@dataclass(frozen=True)
class Script:
    """The source of a script, and what a server calls it."""

    source: str

    @cached_property
    def name(self) -> str:
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()


THERE = Script("""
local found = {}
for number, key in ipairs(KEYS) do found[number] = redis.call('EXISTS', key) end
return table.concat(found)
""")
"""Whether each key is there: a string of 0 and 1."""

CLAIM = Script("""
local found, count = {}, tonumber(ARGV[3])
for number = 1, count do
  local claim, chunk, state = KEYS[number], KEYS[count + number], 'f'
  if chunk and redis.call('EXISTS', chunk) == 1 then
    state = '1'
  elseif not redis.pcall('SET', claim, ARGV[1], 'NX', 'PX', ARGV[2]) then
    local who = redis.pcall('GET', claim)
    if who == ARGV[1] then
      redis.pcall('PEXPIRE', claim, ARGV[2])
    elseif type(who) == 'string' then
      state = 't'
    end
  end
  found[number] = state
end
return table.concat(found)
""")
"""Of each of ARGV[3] claims, and of the chunk that is named behind all of them where chunks are: "1", the chunk is
there; "t", another node's claim is; else "f", and the claim is ARGV[1]'s for ARGV[2] milliseconds. A server that takes
no claim, because it is full or a replica, or this user may not make one or read one, has none taken."""

TOUCH = Script("""
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end
""")
"""Have these keys stay for so many milliseconds."""

OPEN = Script("""
local size = redis.pcall('HSTRLEN', KEYS[1], 'h')
if type(size) == 'table' then return size end
if size == 0 and redis.call('EXISTS', KEYS[1]) == 0 then return false end
local header = ''
if size <= tonumber(ARGV[2]) then header = string.sub(redis.call('HGET', KEYS[1], 'h') or '', 1, tonumber(ARGV[1])) end
return {size, header, redis.call('HLEN', KEYS[1])}
""")
"""Bytes of the header, the first ARGV[1] of them, and how many fields there are; nothing where there is no chunk."""

COMMIT = Script(f"""
redis.call('UNLINK', KEYS[3])
local there = redis.pcall('HGET', KEYS[2], 'h')
if type(there) == 'string' and string.sub(there, 1, 8) == 'KVSCHUNK' and #there >= 32 then
  local reader = string.byte(there, 11) + 256 * string.byte(there, 12)
  local plain = string.sub(there, 25, 32) == string.rep('\\0', 8)
  local ours = plain and reader <= {FORMAT_VERSION}
  if plain and reader == {ENVELOPE_READER} then
    for at = 1, #ARGV[4], 16 do
      ours = ours or string.sub(ARGV[4], at, at + 15) == string.sub(there, 305, 320)
    end
  end
  if not ours then
    redis.call('UNLINK', KEYS[1])
    return 'newer'
  end
end
local count, header, ttl = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local function begins(value) return type(value) == 'string' and string.sub(value, 1, #header) == header end
if redis.call('HLEN', KEYS[1]) ~= count or not begins(redis.call('HGET', KEYS[1], 'h')) then
  redis.call('UNLINK', KEYS[1])
  if begins(there) and redis.call('HLEN', KEYS[2]) == count then return 'stored' end
  return 'incomplete'
end
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[1], KEYS[2])
return 'stored'
""")
"""Make a chunk that was written as KEYS[1] the one that is found as KEYS[2]. The engine may have dropped KEYS[1], or
begun it anew without its first fields: it is counted, and what its header begins with compared. What a newer release
wrote stays, and what is in an envelope of which this node has not the key (ARGV[4]: those that it has, 16 bytes each).
A chunk of the same write that another node committed meanwhile is as good. KEYS[3], the claim on the chunk, has done
its work, whatever became of it."""
