#!/bin/sh
# Install clustercron from this tree, or take it away again.
#
# A release is a directory of its own, with its own Python environment and its own launcher. It is built beside the one
# in use, tried, and then made the current one by a single rename of a symbolic link:
#
#     /opt/clustercron/releases/0.1.0-20260917020000-4711/   bin lib share
#     /opt/clustercron/current  -> releases/0.1.0-20260917020000-4711
#     /opt/clustercron/previous -> the one before
#     /usr/local/bin/clustercron -> /opt/clustercron/current/bin/clustercron
#
# So nobody ever sees half an install, and whatever stops this script leaves the old one working. A launcher names its
# own release, never `current`: a run that was started before the switch goes on loading the modules it began with.
# That is why the release before stays, and any other that a process still runs from.

set -eu
umask 022 # what is installed is for all users, whatever the caller's files are for
# The caller's Python settings reach neither the build nor pip's choice of where to install.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
unset PIP_TARGET PIP_PREFIX PIP_ROOT VIRTUAL_ENV CDPATH
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

usage() {
    cat <<'USAGE'
usage: ./install.sh [--prefix DIR] [--demo]
       ./install.sh --uninstall [--prefix DIR]

As root, clustercron goes to /opt/clustercron, the command to /usr/local/bin with a link in /usr/bin (cron's PATH),
the man pages to /usr/local/share/man. Otherwise all goes below ~/.local, the command to ~/.local/bin.
Run it again to upgrade or repair; an install that fails or is interrupted leaves the old one working.

  --prefix DIR  the command is DIR/bin/clustercron, all else is in DIR/lib and DIR/share; no link in /usr/bin
  --demo        install a small private Redis for `clustercron demo` too, and run the demo
  --uninstall   take away what was installed; configuration (/etc/clustercron.conf) and state stay
  --help        this text

environment
  DESTDIR  put everything below this directory, as files of a machine whose / it will be; the layout is root's
  PYTHON   the Python (3.11 or newer) to use; default: /usr/bin/python3, else the first one found that will do

example
  sudo ./install.sh && clustercron --version
USAGE
}

say() {
    printf '%s\n' "$*"
}

die() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

misuse() {
    printf 'install.sh: %s; see ./install.sh --help\n' "$*" >&2
    exit 2
}

# As a shell would have to be given it.
quoted() {
    case $1 in
    *[!A-Za-z0-9/._+@=-]*) printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s' "$1" ;;
    esac
}

absolute() {
    case $1 in
    *'
'*) misuse 'the path has a line break' ;;
    esac
    case $1 in
    /*) path=$1 ;;
    *) path=$PWD/$1 ;;
    esac
    while [ "$path" != "${path%/}" ]; do
        path=${path%/}
    done
}

prefix=
demo=false
uninstall=false
while [ $# -gt 0 ]; do
    case $1 in
    --prefix)
        [ $# -gt 1 ] || misuse '--prefix: needs a directory'
        prefix=$2
        [ -n "$prefix" ] || misuse '--prefix: needs a directory'
        shift
        ;;
    --prefix=*)
        prefix=${1#--prefix=}
        [ -n "$prefix" ] || misuse '--prefix: needs a directory'
        ;;
    --demo) demo=true ;;
    --uninstall) uninstall=true ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) misuse "$1: not known here" ;;
    esac
    shift
done
! $demo || ! $uninstall || misuse '--demo and --uninstall: one or the other'

root=false
[ "$(id -u)" -ne 0 ] || root=true
stage=
if [ -n "${DESTDIR-}" ]; then
    ! $demo || misuse '--demo: cannot run below DESTDIR'
    absolute "$DESTDIR"
    stage=$path
fi

# Where things are once installed; on the way there, $stage stands before each.
link=
if [ -n "$prefix" ]; then
    absolute "$prefix"
    prefix=$path
    base=$path/lib/clustercron bin=$path/bin man=$path/share/man
elif $root || [ -n "$stage" ]; then
    base=/opt/clustercron bin=/usr/local/bin man=/usr/local/share/man link=/usr/bin/clustercron
else
    [ -n "${HOME-}" ] || die 'HOME is not set: say where with --prefix DIR'
    absolute "$HOME"
    base=$path/.local/lib/clustercron bin=$path/.local/bin man=$path/.local/share/man
fi
command=$bin/clustercron
target=$base/current/bin/clustercron

# Whether a path is a symbolic link that this script made. A file of anybody else is neither replaced nor removed.
is_ours() {
    [ -L "$1" ] && [ "$(readlink "$1")" = "$2" ]
}

is_taken() {
    { [ -e "$1" ] || [ -L "$1" ]; } && ! is_ours "$1" "$2"
}

# The processes that run from a directory. The pattern is nobody's argument, or it would find itself.
users_of() {
    if [ -d /proc/self ]; then
        # shellcheck disable=SC2062  # these are files
        printf '%s\n' "$1/" | grep -lsF -f - /proc/[0-9]*/cmdline | cut -d / -f 3
    else
        ps -axo pid=,command= | DIRECTORY=$1/ awk 'index($0, ENVIRON["DIRECTORY"]) { print $1 }'
    fi
}

# --- uninstall

remove_if_empty() {
    rmdir -- "$1" 2>/dev/null || :
}

if $uninstall; then
    if [ ! -d "$stage$base" ]; then
        say "clustercron is not installed in $base"
        exit 0
    fi
    [ -w "$stage$base" ] || die "cannot remove $base: no permission; run this as its owner"
    pids=$([ -n "$stage" ] || users_of "$base/releases" | tr '\n' ' ')
    [ -z "$pids" ] || die "cannot remove $base: still running from it: pid ${pids% }; try again when it has ended"
    [ -z "$link" ] || ! is_ours "$stage$link" "$command" || rm -f -- "$stage$link"
    ! is_ours "$stage$command" "$target" || rm -f -- "$stage$command"
    for page in "$stage$man"/man[1-9]/*; do
        ! is_ours "$page" "$base/current/share${page#"$stage${man%/man}"}" || rm -f -- "$page"
    done
    made=$(cat "$stage$base/made-directories" 2>/dev/null || :)
    rm -rf -- "$stage$base/releases"
    rm -f -- "$stage$base/current" "$stage$base/previous" "$stage$base/made-directories" "$stage$base/lock" \
        "$stage$base/.link"
    # Deepest first, and only those that an install made.
    printf '%s\n' "$made" | sort -r | while IFS= read -r directory; do
        [ -n "$directory" ] || continue
        case $stage$directory in
        /opt) ;; # a staged install may have made /opt; the machine that it became wants it
        *) remove_if_empty "$stage$directory" ;;
        esac
    done
    remove_if_empty "$stage$base"
    [ ! -d "$stage$base" ] || say "left alone, since it holds other files: $base"
    say "clustercron is gone from $base; configuration and state are where they were"
    exit 0
fi

# --- before anything is touched

tree=$(cd -- "$(dirname -- "$0")" && pwd -P)
if [ ! -f "$tree/pyproject.toml" ] || [ ! -f "$tree/clustercron/__init__.py" ]; then
    die "$tree: not a tree of clustercron"
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$tree/clustercron/__init__.py")
[ -n "$version" ] || die "$tree/clustercron/__init__.py: has no version"

! is_taken "$stage$command" "$target" ||
    die "$command is there and was not installed by this script: remove it, or choose another place with --prefix"

work=$(mktemp -d)
new=
release=
made=

# Leave no half of a release behind. What the switch has made current stays.
clean_up() {
    status=$?
    trap '' HUP INT TERM
    rm -rf -- "$work"
    [ -z "$new" ] || rm -rf -- "$new"
    if [ -n "$release" ] && [ "$(readlink "$stage$base/current" 2>/dev/null)" != "releases/${release##*/}" ]; then
        rm -rf -- "$release"
    fi
    if [ "$status" -ne 0 ] && [ ! -L "$stage$base/current" ] && [ -n "$made" ]; then
        rm -f -- "$stage$base/lock" "$stage$base/made-directories"
        printf '%s\n' "$made" | sort -r | while IFS= read -r directory; do
            [ -z "$directory" ] || remove_if_empty "$stage$directory"
        done
    fi
    exit "$status"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Run a command in silence; if it fails, say what failed and show the last that it said.
quietly() {
    what=$1
    shift
    "$@" </dev/null >"$work/log" 2>&1 9>&- && return 0
    # Of pip's long story the lines that name a cause.
    grep -E 'ERROR:|Error\(' "$work/log" | tail -n 4 >&2 || :
    grep -qE 'ERROR:|Error\(' "$work/log" || tail -n 5 "$work/log" >&2
    die "$what failed, see above; what was installed before is untouched: mend it and run this again"
}

# --- a Python

# 0 will do, 11 too old, 12 without venv, 13 out of reach of other users, anything else is no Python 3.
probe() {
    "$1" -I -c '
import os, sys
if sys.version_info < (3, 11):
    print("%d.%d" % sys.version_info[:2])
    sys.exit(11)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(12)
path = os.path.realpath(sys.executable)
while os.geteuid() == 0 and path != "/":
    if not os.stat(path).st_mode & 1:
        sys.exit(13)
    path = os.path.dirname(path)
' 2>/dev/null
}

# Set `python`, or leave it empty and say in `why` what is wrong with the first one found. The system's own comes first:
# one that a user installed (pyenv, conda) may go away with the user, and root's is out of reach of cron's other users.
find_python() {
    python='' why='no python3 found' lacks=python
    if [ -n "${PYTHON-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || die "PYTHON=$PYTHON: not found"
        result=0
        probe "$PYTHON" >/dev/null || result=$?
        case $result in
        0 | 13) python=$PYTHON ;;
        12) die "PYTHON=$PYTHON: has no venv module; install it, or name another Python" ;;
        *) die "PYTHON=$PYTHON: not a Python 3.11 or newer" ;;
        esac
        return
    fi
    first=true
    for candidate in /usr/bin/python3 /usr/local/bin/python3 python3 python3.13 python3.12 python3.11; do
        candidate=$(command -v "$candidate") || continue
        result=0
        found=$(probe "$candidate") || result=$?
        case $result in
        0)
            python=$candidate
            return
            ;;
        11) problem="is Python $found, and 3.11 is the oldest that will do" lack=newer ;;
        12) problem='has no venv module' lack=venv ;;
        13) problem='is out of reach of other users' lack=python ;;
        *) continue ;;
        esac
        # A Python that only lacks its venv module is the nearest to being one that will do.
        if $first || { [ "$lack" = venv ] && [ "$lacks" != venv ]; }; then
            why="$candidate $problem" lacks=$lack nearest=$candidate first=false
        fi
    done
}

# The sets of packages that may bring what is lacking, the likeliest first, one a line.
package_sets() {
    case $1 in
    apt-get)
        case $lacks in
        python) say python3 python3-venv ;;
        venv)
            case $nearest in
            *python3.*) say "${nearest##*/}-venv" ;;
            *) say python3-venv ;;
            esac
            ;;
        esac
        # Without a look at whether they are to be had, since a plain user's lists may be old: root tries, and sees.
        [ "$lacks" != newer ] || printf 'python3.%s python3.%s-venv\n' 13 13 12 12 11 11
        ;;
    dnf)
        [ "$lacks" = newer ] || say python3
        printf 'python3.%s\n' 13 12 11
        ;;
    apk) say python3 ;;
    esac
}

install_packages() {
    case $manager in
    apt-get) DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" ;;
    dnf) dnf install -q -y "$@" ;;
    apk) apk add -q "$@" ;;
    esac </dev/null >"$work/log" 2>&1
}

find_python
if [ -z "$python" ]; then
    manager=
    for tool in apk dnf apt-get; do
        ! command -v "$tool" >/dev/null 2>&1 || manager=$tool
    done
    if [ -n "$manager" ] && $root; then
        [ "$manager" != apt-get ] || apt-get update -qq </dev/null >"$work/log" 2>&1 || :
        package_sets "$manager" >"$work/sets"
        while [ -z "$python" ] && read -r packages; do
            # shellcheck disable=SC2086  # names of packages
            if install_packages $packages; then
                say "installed with $manager, since $why: $packages"
                find_python
            fi
        done <"$work/sets"
    fi
fi
if [ -z "$python" ]; then
    case ${manager:-none} in
    apt-get) install='apt-get install' ;;
    dnf) install='dnf install' ;;
    apk) install='apk add' ;;
    none) die "$why: install Python 3.11 or newer with its venv module, then run this again" ;;
    esac
    if $root; then
        tail -n 3 "$work/log" >&2
        die "$why, and $manager brought none: install one and name it: PYTHON=/path/to/python3 ./install.sh"
    fi
    # Where the system's python3 is too old, the oldest that will do is the likeliest to be had.
    if [ "$lacks" = newer ]; then
        packages=$(package_sets "$manager" | tail -n 1)
    else
        packages=$(package_sets "$manager" | head -n 1)
    fi
    die "$why: run: sudo $install $packages"
fi

# --- build the release beside the old one

# Make a directory, and note which of its parents are new, so that an uninstall takes away those and no others.
make_directory() {
    missing=
    parent=$1
    while [ ! -d "$stage$parent" ] && [ -n "$parent" ]; do
        missing="$parent
$missing"
        parent=${parent%/*}
    done
    mkdir -p -- "$stage$1" 2>"$work/log" ||
        die "cannot make $stage$1: no permission, or a file is in the way; run as root, or choose a place with --prefix"
    made="$made
$missing"
}

make_directory "$base/releases"
# The lock belongs to the open file, which this shell keeps: it ends with the shell, however that ends.
exec 9>>"$stage$base/lock" || die "cannot write to $base: run as its owner, or choose another place with --prefix"
"$python" -I -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null ||
    die "another install is at work in $base: try again when it has ended"
# What an install that was killed has left. We hold the lock, so nobody is building there.
rm -rf -- "$stage$base"/releases/.new.* "$stage$base/.link"

# Only now, so that a second one that finds the lock taken has nothing to clear.
id=$version-$(date -u +%Y%m%d%H%M%S)-$$
make_directory "$bin"
for page in "$tree"/man/*.[1-9]; do
    [ ! -f "$page" ] || make_directory "$man/man${page##*.}"
done
[ -z "$link" ] || make_directory "${link%/*}"
printf '%s\n' "$made" >>"$stage$base/made-directories"
new=$stage$base/releases/.new.$$
final=$base/releases/$id

say "installing clustercron $version into $base with $("$python" -V)"
quietly 'making the Python environment' "$python" -I -m venv -- "$new"
extra=
! $demo || extra='[demo]'
quietly 'installing the packages with pip' \
    "$new/bin/python3" -I -m pip install -q --no-compile --prefer-binary "$tree$extra"

# What an environment brings for people who work in it. Nothing in a release may name the place it was built in.
quietly 'clearing the Python environment' "$new/bin/python3" -I -m pip uninstall -q -y pip setuptools
find "$new/bin" ! -type d ! -name 'python*' -exec rm -f -- {} +
rm -f -- "$new"/lib/python3*/site-packages/clustercron_redis-*.dist-info/direct_url.json
sed '/^command = /d' "$new/pyvenv.cfg" >"$work/pyvenv.cfg"
cat "$work/pyvenv.cfg" >"$new/pyvenv.cfg"

for page in "$tree"/man/*.[1-9]; do
    [ -f "$page" ] || continue
    mkdir -p -- "$new/share/man/man${page##*.}"
    cat <"$page" >"$new/share/man/man${page##*.}/${page##*/}"
done

# The launcher. -I: neither PYTHONPATH nor a file in the job's directory changes what is imported. -S: nor does the
# machine's sitecustomize, and without the site module Python starts a little sooner; so the launcher itself names the
# directory of packages. `#!` takes no space in a path and, on older systems, no more than 127 bytes: there a shell
# starts Python in its own place.
cat >"$work/launcher.py" <<'PYTHON'
import os
import re
import shlex
import sys

new, final = sys.argv[1:]
interpreter = f"{final}/bin/python3"
packages = f"{final}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
code = f"""\
import sys

sys.path.append({packages!a})
from clustercron.__main__ import main

sys.exit(main())
"""
shebang = f"#!{interpreter} -IS\n"
if re.fullmatch(r"#!/[A-Za-z0-9/._+@=-]+ -IS\n", shebang) and len(shebang) <= 127:
    text = shebang + code
else:
    os.mkdir(f"{new}/launch")
    with open(f"{new}/launch/clustercron", "w", encoding="ascii") as file:
        file.write(code)
    text = f'#!/bin/sh\nexec {shlex.quote(interpreter)} -IS {shlex.quote(f"{final}/launch/clustercron")} "$@"\n'
with open(f"{new}/bin/clustercron", "w", encoding="utf-8", errors="surrogateescape") as file:
    file.write(text)
os.chmod(f"{new}/bin/clustercron", 0o755)
PYTHON
quietly 'writing the launcher' "$new/bin/python3" -I "$work/launcher.py" "$new" "$final"

# Compiled once, here: another user, or a read-only file system, would compile at every start. Not tied to the times of
# the source files, which images and backups change. A file that does not compile is none that is imported.
compile() {
    "$new/bin/python3" -I -m compileall -q "$@" -s "$new" -p "$final" --invalidation-mode unchecked-hash "$new/lib"
}
compile -j 0 >"$work/log" 2>&1 9>&- || compile >"$work/log" 2>&1 9>&- || :
chmod -R u=rwX,go=rX "$new"

# --- try it, then switch

release=$stage$final
mv -- "$new" "$release"
new=
if [ -z "$stage" ]; then
    quietly 'starting the new release' "$release/bin/clustercron" --version
else
    quietly 'starting the new release' "$release/bin/python3" -I -m clustercron --version
fi
[ "$(cat "$work/log")" = "clustercron $version" ] || die "the new release does not answer with its version, $version"
sync # or a power cut could leave the switch done and the files empty

# Point a link of the base somewhere else, in one step: there is no instant without it.
switch() {
    ln -s -- "$2" "$stage$base/.link"
    "$release/bin/python3" -I -c 'import os, sys; os.replace(*sys.argv[1:])' "$stage$base/.link" "$stage$base/$1"
}

old=$(readlink "$stage$base/current" || :)
[ -z "$old" ] || switch previous "$old"
switch current "releases/$id"
[ -L "$stage$command" ] || ln -s -- "$target" "$stage$command"

for page in "$release"/share/man/man[1-9]/*; do
    [ -f "$page" ] || continue
    page=${page#"$release/share/man/"}
    if is_taken "$stage$man/$page" "$base/current/share/man/$page"; then
        say "left alone, since this script did not make it: $man/$page"
    elif [ ! -L "$stage$man/$page" ]; then
        ln -s -- "$base/current/share/man/$page" "$stage$man/$page"
    fi
done
# Pages that this release no longer has.
for page in "$stage$man"/man[1-9]/*; do
    page=${page#"$stage$man/"}
    [ -f "$release/share/man/$page" ] || ! is_ours "$stage$man/$page" "$base/current/share/man/$page" ||
        rm -f -- "$stage$man/$page"
done

linked=
if [ -n "$link" ]; then
    if is_taken "$stage$link" "$command"; then
        say "left alone, since this script did not make it: $link; cron's PATH has no other clustercron"
    else
        [ -L "$stage$link" ] || ln -s -- "$command" "$stage$link"
        linked=", linked from ${link%/*} for cron"
    fi
fi

# The release before stays, since a run may still load modules of it; so does any other that something runs from.
for kept in "$stage$base"/releases/*; do
    case releases/${kept##*/} in
    "$(readlink "$stage$base/current")" | "$(readlink "$stage$base/previous" || :)") continue ;;
    esac
    if [ -n "$stage" ] || [ -z "$(users_of "$kept")" ]; then
        rm -rf -- "$kept"
    fi
done

# --- what now

name=clustercron page=clustercron
case :$PATH: in
*":$bin:"*) ;;
*)
    if [ -z "$linked" ]; then
        name=$(quoted "$command") page=$(quoted "$man/man1/clustercron.1")
        [ -n "$stage" ] || say "not on your PATH: $bin; to have it there: export PATH=\"$bin:\$PATH\""
    fi
    ;;
esac
say "clustercron $version is installed: $command$linked"
[ -n "$linked" ] || say "cron's PATH is /usr/bin:/bin: in a crontab write $(quoted "$command")"
if $demo; then
    say "now: $name demo"
    trap - EXIT HUP INT TERM
    rm -rf -- "$work"
    exec "$command" demo 9>&-
fi
say 'next:'
say "  $(quoted "$tree/install.sh") --demo${prefix:+ --prefix $(quoted "$prefix")}   see five nodes share one tick"
say "  man $page"
say '  CLUSTERCRON_REDIS_URL=redis://HOST:6379/0 in /etc/clustercron.conf, then your crontab lines: README.md'
