"""The last error in a process's log, for the user who started it. Pure."""

import json


def exit_reason(log_tail: str) -> str:
    """The last error in the lines, without its traceback; "" where they hold none.

    Lines are a role's JSON log, or what the command line says of wrong options.
    """
    for line in reversed(log_tail.splitlines()):
        if reason := _reason(line):
            return reason
    return ""


def _reason(line: str) -> str:
    for beginning in ("Error: ", "penstock: "):
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(record, dict) or record.get("level") not in ("error", "critical"):
        return ""
    traceback = str(record.get("traceback", "")).strip()
    if traceback:
        # `package.module.Class: message`; who starts a mesh has no use for the module.
        name, _, message = traceback.splitlines()[-1].partition(": ")
        return f"{name.rpartition('.')[2]}: {message}" if message else name
    return str(record.get("error") or record.get("message", ""))
