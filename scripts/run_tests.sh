#!/usr/bin/env bash
# All tests but those with a command of their own (CONTRIBUTING.md), as two runs side by side. Tests against the wall clock
# (marker `real_time`) start processes and wait for them; the others only compute, and do so at a lower priority. What those
# print is shown at the end. Arguments: a Python, then those of pytest for both.
set -um # each run is a process group of its own: one in the background would not hear Ctrl-C otherwise
python=$1
shift
# Some machines forbid it: then every process that a test starts compiles all modules again, three seconds of CPU each.
export PYTHONDONTWRITEBYTECODE=
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
trap 'kill -INT -- $(printf -- "-%s " $(jobs -p)); wait; cat "$printed"; exit 130' INT TERM

(exec nice -n 5 "$python" -m pytest -q -r fER -m "not real_time and not clients and not docker and not ray and not kubernetes" "$@" >"$printed" 2>&1) &
computing=$!
("$python" -m pytest -q -r fER -m "real_time and not ranks and not clients and not docker and not ray and not kubernetes" "$@") &
wait $!
real_time_status=$?
echo "--- tests that compute:"
wait $computing
computing_status=$?
cat "$printed"

none_chosen=5 # pytest's exit status
if [ $real_time_status = $none_chosen ]; then exit $computing_status; fi
if [ $computing_status = $none_chosen ]; then exit $real_time_status; fi
exit $((real_time_status || computing_status))
