"""Scripts that a server runs as one step, because they must be atomic or because they ask for many keys at once.

Each script names its keys. All keys of one call lie on one node, except those of ``THERE``, ``CLAIM`` and ``TOUCH``,
which are never sent to a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1

from kvstore.chunk import ENVELOPE_READER
from kvstore.keys import FORMAT_VERSION

HEADER_BYTES_MAX = 16 << 20
"""No script returns more bytes of a header."""


@dataclass(frozen=True)
class Script:
    """The source of a script, and the name by which a server knows it."""

    source: str

    @cached_property
    def name(self) -> str:
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()


THERE = Script("""
local found = {}
for number, key in ipairs(KEYS) do found[number] = redis.call('EXISTS', key) end
return table.concat(found)
""")
"""Returns whether each key is there: a string of 0 and 1."""

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
"""Returns a letter for each of ARGV[3] claims. The chunks' keys, if any, follow the claims' keys. "1": the chunk is
there; "t": another node has the claim; else "f", and ARGV[1] has the claim for ARGV[2] milliseconds. A server that
takes no claim (it is full, or a replica, or this user may not set or read one) reports no claim as taken."""

TOUCH = Script("""
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end
""")
"""Have these keys stay for ARGV[1] milliseconds."""

OPEN = Script("""
local size = redis.pcall('HSTRLEN', KEYS[1], 'h')
if type(size) == 'table' then return size end
if size == 0 and redis.call('EXISTS', KEYS[1]) == 0 then return false end
local header = ''
if size <= tonumber(ARGV[2]) then header = string.sub(redis.call('HGET', KEYS[1], 'h') or '', 1, tonumber(ARGV[1])) end
return {size, header, redis.call('HLEN', KEYS[1])}
""")
"""Returns the length of the header, its first ARGV[1] bytes, and the number of fields; nothing where there is no
chunk."""

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
"""Make a chunk that was written as KEYS[1] available as KEYS[2]. The engine may have dropped KEYS[1], or begun it anew
without its first fields: so its fields are counted, and the start of its header is compared. A chunk that a newer
release wrote stays, and so does one in an envelope whose key this node lacks (ARGV[4]: the key ids that it has, 16
bytes each). A chunk of the same write that another node committed meanwhile is as good. KEYS[3], the claim on the
chunk, is removed in any case."""
