"""The shell scripts that move files on the host: POSIX sh, and what every Linux has beside it."""

from __future__ import annotations

_COMMON = r"""LC_ALL=C; export LC_ALL; umask 077
case $1 in "~/"*) f=$HOME/${1#"~/"};; *) f=$1;; esac
d=${f%/*}; [ "$d" = "$f" ] && d=.; [ -n "$d" ] || d=/
size() { echo $(($(wc -c <"$1"))); }
tool=
for t in $FIRST openssl python3 sha256sum shasum; do command -v "$t" >/dev/null 2>&1 && { tool=$t; break; }; done
modern() { python3 -I -S -c 'import fcntl, hashlib, os; os.sendfile, os.readv' >/dev/null 2>&1; }
hash() { # openssl and Python use the processor's own instructions; sha256sum, which starts faster, often does not
 case $tool in
  openssl) openssl dgst -sha256 -r;;
  python3) python3 -I -S -c 'import hashlib
h = hashlib.sha256(); f = open(0, "rb")
for b in iter(lambda: f.read(1 << 20), b""): h.update(b)
print(h.hexdigest())';;
  shasum) shasum -a 256;;
  *) sha256sum;;
 esac 2>/dev/null | cut -c1-64
}
"""
# Large files: one process that reads once, in large pieces, and hashes beside it takes a third of the time of tee or
# cat with a process for the checksum. F_SETPIPE_SZ (1031) makes sshd's pipe larger; not every system lets it.
_STORE = r"""import fcntl, hashlib, os, sys
try: fcntl.fcntl(0, 1031, 1 << 20)
except OSError: pass
part = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
digest = hashlib.sha256(); room = bytearray(1 << 18); view = memoryview(room)
for source in part, 0:
 while True:
  got = os.readv(source, [room])
  if not got: break
  done = got if source == part else 0
  while done < got: done += os.write(part, view[done:got])
  digest.update(view[:got])
print(digest.hexdigest())"""
# The file goes to the pipe without a copy (sendfile) where the file system can. $1 file, $2 offset, $3 "sum" or "-"
_SEND = r"""import fcntl, hashlib, os, sys
try: fcntl.fcntl(1, 1031, 1 << 20)
except OSError: pass
file = os.open(sys.argv[1], os.O_RDONLY); skip = int(sys.argv[2]); wanted = sys.argv[3] == "sum"
digest = hashlib.sha256(); room = bytearray(1 << 17); view = memoryview(room); quick = True
def put(at, end):
 global quick
 while at < end:
  sent = 0
  try: sent = os.sendfile(1, file, at, end - at) if quick else 0
  except BrokenPipeError: raise
  except OSError: pass
  if not sent:
   quick = False
   data = os.pread(file, min(end - at, len(room)), at)
   if not data: return
   sent = os.write(1, data)
  at += sent
if not wanted: put(skip, os.fstat(file).st_size)
at = 0
while wanted:
 got = os.readv(file, [room])
 if not got: break
 put(max(at, skip), at + got)
 digest.update(view[:got]); at += got
if wanted: os.write(2, b"sum %s\n" % digest.hexdigest().encode())"""
# $1 target, $2 key of the part, $3 size, $4 mode, $5 checksum or "-"
UPLOAD = (
    'FIRST=; [ "$5" = - ] || FIRST=sha256sum; '
    + _COMMON
    + r"""
store() { # adds stdin to the part; says the checksum of all of it, and "stored" when nothing went wrong
 if [ "$5" = - ] && modern; then python3 -I -S -c '"""
    + _STORE
    + r"""' "$p" && echo stored
 else { { cat "$p"; tee -a "$p" && echo stored >&3; } | hash; } 3>&1
 fi
}
[ -d "$d" ] || mkdir -p "$d" || exit 73
[ -d "$f" ] && { echo "$f is a folder" >&2; exit 73; }
p=$d/.${f##*/}.$2.part; have=0; old=-
if [ -s "$p" ]; then have=$(size "$p"); [ "$have" -le "$3" ] && old=$(hash <"$p"); fi
free=$(df -Pk "$d" 2>/dev/null | awk 'NR==2{print $4}')
echo "part $have $old ${free:--}"
IFS= read -r go || exit 75
[ "$go" = append ] || : >"$p" || exit 73
# The checksum is made while the bytes come in.
said=$(store "$@")
ok=; s=; for w in $said; do if [ "$w" = stored ]; then ok=1; else s=$w; fi; done
[ -n "$ok" ] || { rm -f "$p"; exit 74; }
[ "$5" = - ] && { echo "sum $(size "$p") $s"; exit 0; }
[ "$(size "$p")" = "$3" ] || exit 75
if [ "$s" != "$5" ]; then rm -f "$p"; echo "sum $3 $s"; exit 76; fi
chmod "$4" "$p" && mv -f "$p" "$f" && echo "sum $3 $s"
"""
)
# $1 target, $2 key of the part, $3 mode
COMMIT = (
    "FIRST=; "
    + _COMMON
    + r"""
p=$d/.${f##*/}.$2.part; chmod "$3" "$p" && mv -f "$p" "$f"
"""
)
DISCARD = (
    "FIRST=; "
    + _COMMON
    + r"""rm -f "$d/.${f##*/}.$2.part"
"""
)
# $1 source, $2 "sum" or "-"
DOWNLOAD = (
    "FIRST=; "
    + _COMMON
    + r"""
[ -e "$f" ] || { echo "$f does not exist" >&2; exit 72; }
[ -f "$f" ] || { echo "$f is no regular file" >&2; exit 72; }
[ -r "$f" ] || { echo "$f may not be read" >&2; exit 72; }
size=$(size "$f"); echo "size $size" >&2
IFS= read -r from || exit 75
if [ "$size" -gt 4194304 ] && modern; then exec python3 -I -S -c '"""
    + _SEND
    + r"""' "$f" "$from" "$2"; fi
if [ "$2" = sum ]; then { echo "sum $(hash <"$f")" >&2; } & fi
if [ "$from" = 0 ]; then cat "$f"; else tail -c "+$((from+1))" "$f"; fi
wait
"""
)
