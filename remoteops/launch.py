"""The shell scripts that find the agent's archive and an interpreter on a host, and start a verb."""

from __future__ import annotations

# Looks for the archive and an interpreter and starts the verb, all in one round trip. Python is run on the archive's
# unpacked twin, where it keeps compiled modules, so that a verb starts in the time that Python itself takes.
# $1 archive name, $2 its checksum, $3 verb, $4 interpreter or "", $5 interpreter of the venv or "", then folders.
START = r"""n=$1 h=$2 v=$3 py=$4 vpy=$5; shift 5; a=
for d; do
 case $d in
  "~/"*) d=$HOME/${d#"~/"};;
  "%tmp") d=${TMPDIR:-/tmp}/remoteops-$(id -u);;
  "%uid/"*) d=/${d#%uid/}/remoteops-$(id -u);;
 esac
 if [ -f "$d/$n" ] && [ -O "$d/$n" ]; then a=$d/$n; break; fi
done
[ -n "$a" ] || { echo need-archive; exit 0; }
s=$(sha256sum <"$a" 2>/dev/null)
case $s in "$h"*|"") ;; *) echo need-archive; exit 0;; esac
if [ -n "$py" ]; then
 case $py in "~/"*) py=$HOME/${py#"~/"};; esac
 set -- "$py"
else
 set -- python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python \
  /usr/bin/python3 /usr/local/bin/python3 "$vpy" "$HOME/miniconda3/bin/python3" "$HOME/anaconda3/bin/python3" \
  /opt/conda/bin/python3 "$HOME/.local/bin/python3"
fi
t=${a%.pyz}
for p; do
 [ -n "$p" ] && p=$(command -v "$p" 2>/dev/null) && [ -n "$p" ] || continue
 e=$t/__main__.py
 [ -f "$e" ] || "$p" -I -S -c 'import os,sys,zipfile
a,t=sys.argv[1:]
d="%s.%d"%(t,os.getpid())
os.mkdir(d,0o700)
zipfile.ZipFile(a).extractall(d)
try: os.rename(d,t)
except OSError: __import__("shutil").rmtree(d)
sys.path.insert(0,t)
from remoteops.agent.tidy import tidy
tidy(os.path.dirname(t),os.path.basename(t))' "$a" "$t" >/dev/null 2>&1
 [ -f "$e" ] && [ -O "$e" ] || e=$a
 echo "interpreter $p"; echo "archive $a"; echo "entry $e"
 "$p" -I -S -X utf8 "$e" "$v"; s=$?
 case $s in 2|69|126|127) continue;; *) exit $s;; esac
done
echo no-interpreter; exit 0
"""
FOLDER = r"""d=$1
case $d in "%tmp") d=${TMPDIR:-/tmp}/remoteops-$(id -u);; "%uid/"*) d=/${d#%uid/}/remoteops-$(id -u);; esac
(umask 077; mkdir -p "$d") && [ -d "$d" ] && [ ! -L "$d" ] && [ -O "$d" ] && [ -w "$d" ] && chmod 700 "$d" &&
 printf '%s\n' "$d"
"""
# Where the archive may lie when the cache folder cannot be written (read-only home, full quota).
OTHER_FOLDERS = ("%tmp", "%uid/var/tmp", "%uid/dev/shm")
SEARCHED = "python3, python3.14 … python3.9, python in PATH; /usr/bin, /usr/local/bin, the venv, conda folders"
