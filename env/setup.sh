# Makes .venv, once; sourced by env/lab, env/test and others, which set $root to the checkout's folder.
#
# After `prepare`, the programs of .venv come first on PATH. $stamp says what is installed there
# (see `wanted`), or "unfinished" while an installation is under way. POSIX sh.

venv=$root/.venv
stamp=$venv/.stamp
log=$venv/install.log
pythons="3.11 3.12 3.13 3.14" # those for which every pinned package has a wheel
wheels=''       # the folder that env/offline made, where it is installed from that alone
venv_options='' # of python -m venv
gib=''          # of disk for an installation
constraints=env/constraints.txt
unbundled='npm could not get|esbuild could not|bundling the widgets needs' # as env/bundle.py says it

say() { printf '%s\n' "$*" >&2; }

# fail WHAT [WHAT-TO-DO ...]
fail() {
    say ""
    say "error: $1"
    shift
    for line do say "  $line"; done
    exit 1
}

prepare() {
    cd "$root"
    wanted=$(wanted)
    up_to_date || install_alone
    # Terminals and `!` commands in notebooks shall find them too.
    PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
    export PATH VIRTUAL_ENV
    # Containers set it for what runs once; here each of many processes would compile the package.
    unset PYTHONDONTWRITEBYTECODE
}

# Two first starts at once take turns.
install_alone() {
    if command -v flock >/dev/null; then
        exec 9<"$root/pyproject.toml"
        flock -n 9 || { say "another start is installing; waiting for it"; flock 9 || :; }
    fi
    up_to_date || install
    exec 9<&-
}

up_to_date() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]
}

# The hash of what the installation depends on, and its place: neither a venv nor an editable install
# survives a move.
wanted() {
    {
        for file in pyproject.toml "$constraints" env/bundle.py workbench/widgets/.npmrc \
            workbench/widgets/*.json workbench/widgets/*.js workbench/widgets/*.css \
            workbench/widgets/*/*.js workbench/widgets/*/*.css; do
            case $file in workbench/widgets/bundle/*) continue ;; esac # made from the others
            if [ -f "$file" ]; then printf '%s\n' "$file" && cat "$file"; fi
        done
    } | { sha256sum 2>/dev/null || shasum -a 256 2>/dev/null || cksum; }
    printf 'in %s\n' "$root"
}

install() {
    if [ -d "$venv" ] && ! reusable; then
        say ".venv was moved, does not work or was not finished: beginning anew"
        rm -rf "$venv"
    fi
    if [ -d "$venv" ]; then
        say "[1/2] .venv is there; what it should hold has changed"
    else
        find_python
        require_disk
        say "[1/2] making .venv with $python (Python $version)"
        mkdir "$venv"
        echo unfinished >"$stamp"
        # shellcheck disable=SC2086 # none is no option
        "$python" -m venv $venv_options "$venv" || fail "$python could not make a virtual environment (above)"
    fi
    say "[2/2] installing the pinned packages (a few minutes, the first time)"
    echo unfinished >"$stamp"
    rm -f "$log"
    pip_install "$venv/bin/python" || explain $?
    rm -f "$log"
    echo "$wanted" >"$stamp"
    say "done"
}

# pip_install PYTHON: from pip's index, or from env/offline's folder alone, whatever pip's
# configuration says; there every package is named, so that nothing is resolved.
pip_install() {
    into=$1
    if [ -z "$wheels" ]; then
        set -- --constraint "$constraints" --editable '.[test]'
    else
        export PIP_CONFIG_FILE=/dev/null
        set -- --isolated --no-index --find-links "$wheels" \
            --no-deps --requirement "$wheels/../requirements.txt" --editable .
    fi
    # PIP_USER: a `user = true` in pip's configuration does not suit a virtual environment.
    PIP_USER=0 "$into" -m pip install --no-input --disable-pip-version-check \
        --log "$log" "$@" >&2
}

# Whether .venv can be brought up to date: it works, is where it was made, and no installation into
# it was cut short.
reusable() {
    case $(cat "$stamp" 2>/dev/null) in
    '' | *"
in $root") ;; # made by hand, or here
    *) return 1 ;;
    esac
    is_supported "$(version_of "$venv/bin/python")" &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || :; }

is_supported() { case " $pythons " in *" ${1:-none} "*) ;; *) return 1 ;; esac; }

# Sets $python and $version. Version managers put stand-ins on PATH that fail when they are run, so
# a candidate counts only once it has answered.
find_python() {
    unsuited='' bare=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.14 python3.13 python3.12 python3.11 python
    fi
    for python do
        version=$(version_of "$python")
        if [ -z "$version" ]; then
            [ -z "${PYTHON:-}" ] || unsuited=" $PYTHON, which does not run;"
        elif ! is_supported "$version"; then
            unsuited="$unsuited $python is $version;"
        elif ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            bare="${bare:-$version}"
        else
            return 0
        fi
    done
    [ -z "$bare" ] || fail "Python $bare is here, but not its modules venv and ensurepip" \
        "Debian, Ubuntu: apt-get install python$bare-venv" \
        "elsewhere: install Python from python.org, conda or pyenv, which have them" \
        "then start again, with PYTHON=/path/to/python if it is not on PATH"
    found=${unsuited:-" none"}
    fail "needs one of Python $pythons; found:${found%;}" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv)" \
        "then start again, with PYTHON=/path/to/python if it is not on PATH"
}

require_disk() {
    if [ -z "$gib" ]; then
        gib=3
        if command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia/version ]; then gib=9; fi
    fi
    # The last line's fourth column, in KiB; where df says something else, pip will tell.
    # shellcheck disable=SC2046
    set -- $(df -Pk "$root" 2>/dev/null | tail -n 1)
    case ${4:-none} in *[!0-9]*) return 0 ;; esac
    [ "$4" -ge $((gib * 1024 * 1024)) ] || fail \
        "the installation needs $gib GiB in $root, and $(($4 / 1024)) MiB are free" \
        "free some, or put the checkout on another disk"
}

# explain STATUS: says why pip failed, as far as its log tells. The next start begins anew.
explain() {
    [ "$1" -ne 130 ] || fail "interrupted; the next start begins anew"
    if logged 'No space left on device|Disk quota exceeded'; then
        set -- "the disk is full" "free some space: pip also needs it in ${TMPDIR:-/tmp} and its cache"
    elif logged "$unbundled"; then
        set -- "the widgets' scripts could not be bundled" "$(build_words)"
    elif [ -n "$wheels" ] && logged 'No matching distribution|not a supported wheel'; then
        set -- "the wheels do not suit this machine, with the words above" \
            "they are for Python $(cat "$wheels/../python") on $(cat "$wheels/../platform")" \
            "collect them again, with env/offline DIR --python and --platform"
    elif logged 'CERTIFICATE_VERIFY_FAILED'; then
        set -- "pip does not trust the certificate of the package index" \
            "name your network's certificate: pip config set global.cert FILE"
    elif logged 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|ReadTimeout'; then
        set -- "pip cannot reach its package index" "check the network; behind a proxy or a mirror:" \
            "pip config set global.proxy URL, or pip config set global.index-url URL"
    elif [ "$1" -eq 137 ]; then
        set -- "pip was killed: most likely, memory ran out" "close other programs"
    else
        set -- "pip failed, with the words above"
    fi
    fail "$@" "pip's whole log: $log" "then start again"
}

logged() { grep -Eq "$1" "$log" 2>/dev/null; }

# With a log, pip does not show what a build said.
build_words() {
    sed -nE -e 's/^[0-9-]+T[0-9:,]+ +//' \
        -e "/$unbundled/,/^ERROR/{/^ERROR/!p;}" "$log" | head -n 20
}
