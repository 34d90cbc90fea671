"""A plain C interface to exported CPU kernels: a header, and the few lines that stand between it and TVM's calls.

A kernel takes an array of tagged values (``TVMFFIAny`` of tvm-ffi's ``c_api.h``), runs its tasks by the function that
the variable ``__TVMBackendParallelLaunch`` points to (TVM's ``c_backend_api.h``), and needs nothing else of TVM.
"""

from __future__ import annotations

import re
from typing import Any

C_TYPES = {"int32": "int32_t", "int64": "int64_t", "float32": "float"}
HEADER = """\
/* Attention kernels compiled by treeattn. manifest.json says what every argument means. */
#ifndef TREEATTN_H
#define TREEATTN_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {{
#endif

{constants}

typedef struct {{
{fields}
}} treeattn_arguments;

/* One of num_tasks parts of the work; group is {{NULL, num_tasks}}. */
typedef struct {{
  void *unused;
  int32_t num_tasks;
}} treeattn_group;
typedef int (*treeattn_task)(int task, treeattn_group *group, void *data);

/* Runs task(i, group, data) for every i below num_tasks, at once or in turns; 0 if all of them returned 0.
   num_tasks 0 leaves the number to the launcher: the kernel shares its work out evenly. */
typedef int (*treeattn_launch)(treeattn_task task, void *data, int num_tasks);

/* Threads to run tasks on; without a call, or with NULL, the calling thread runs them all. Not while a kernel runs. */
void treeattn_set_launch(treeattn_launch launch);

/* Return 0, or -1 with a message on standard error. Thread-safe if workspace and row_bounds are the caller's own. */
{prototypes}

#ifdef __cplusplus
}}
#endif
#endif
"""
SOURCE = """\
#include "treeattn.h"

#include <stddef.h>
#include <stdio.h>

enum {{ INT = 1, FLOAT = 3, POINTER = 4 }};
typedef struct {{
  int32_t type;
  uint32_t padding;
  union {{
    int64_t i;
    double f;
    void *p;
  }} value;
}} any;

treeattn_launch __TVMBackendParallelLaunch;

#define WEAK __attribute__((weak))

/* Only called for arguments of a wrong type, which the struct rules out; tvm-ffi's own wins where it is linked. */
WEAK void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t num_parts) {{
  fprintf(stderr, "treeattn: %s: ", kind);
  for (int32_t i = 0; i < num_parts; ++i)
    if (parts[i]) fputs(parts[i], stderr);
  fputc('\\n', stderr);
}}

static int run_here(treeattn_task task, void *data, int num_tasks) {{
  treeattn_group group = {{NULL, num_tasks > 0 ? num_tasks : 1}};
  int status = 0;
  for (int i = 0; i < group.num_tasks; ++i) status |= task(i, &group, data);
  return status;
}}

void treeattn_set_launch(treeattn_launch launch) {{
  __TVMBackendParallelLaunch = launch ? launch : run_here;
}}

typedef int kernel(void *self, const any *args, int32_t num_args, any *result);

static int call(kernel *function, const treeattn_arguments *a) {{
  const any args[] = {{
{values}
  }};
  any result = {{0, 0, {{0}}}};
  if (!__TVMBackendParallelLaunch) treeattn_set_launch(NULL);
  return function(NULL, args, sizeof args / sizeof args[0], &result);
}}

{entries}
"""


def header(kernels: list[dict[str, Any]]) -> str:
    """Return ``treeattn.h`` for the entries of a manifest, which share the struct of arguments."""
    each = zip(*(kernel["functions"]["attention"]["arguments"] for kernel in kernels), strict=True)
    return HEADER.format(
        constants="\n".join(line for kernel in kernels for line in _constants(kernel)),
        fields="\n".join(map(_field, each)),
        prototypes="\n".join(f"int {_entry(kernel)}(const treeattn_arguments *arguments);" for kernel in kernels),
    )


def source(kernels: list[dict[str, Any]]) -> str:
    """Return ``treeattn.c``."""
    arguments = kernels[0]["functions"]["attention"]["arguments"]
    entries = []
    for kernel in kernels:
        symbol = kernel["functions"]["attention"]["symbol"]
        entries.append(
            f"kernel {symbol};\n"
            f"int {_entry(kernel)}(const treeattn_arguments *arguments) {{ return call({symbol}, arguments); }}"
        )
    return SOURCE.format(values="\n".join(_value(argument) for argument in arguments), entries="\n".join(entries))


def _entry(kernel: dict[str, Any]) -> str:
    return str(kernel["functions"]["attention"]["entry"])


def _constants(kernel: dict[str, Any]) -> list[str]:
    """Sizes that a caller needs, named after the kernel."""
    tile = kernel["tile"]
    values = {
        "rows": tile["rows"],
        "few": ", ".join(map(str, tile["few"])),
        "num_few": len(tile["few"]),
        "num_leaves": len(kernel["leaves"]),
        "workspace_floats": kernel["workspace_floats"],
    }
    prefix = re.sub(r"\W", "_", _entry(kernel)).upper()
    return [f"#define {prefix}_{name.upper()} {value}" for name, value in values.items()]


def _field(same: tuple[dict[str, Any], ...]) -> str:
    """Declare an argument, as each kernel describes it: their dtypes may differ."""
    argument, dtypes = same[0], list(dict.fromkeys(each["dtype"] for each in same))
    if argument["kind"] == "scalar":
        return f"  {C_TYPES[argument['dtype']]} {argument['name']}; /* {argument['meaning']} */"
    const = "" if argument["access"] == "read_write" else "const "
    element = C_TYPES.get(dtypes[0], "void") if len(dtypes) == 1 else "void"
    return f"  {const}{element} *{argument['name']}; /* {' or '.join(dtypes)} [{argument['shape']}] */"


def _value(argument: dict[str, Any]) -> str:
    name = argument["name"]
    if argument["kind"] == "buffer":
        return f"      {{POINTER, 0, {{.p = (void *)a->{name}}}}},"
    tag, member = ("FLOAT", "f") if argument["dtype"] == "float32" else ("INT", "i")
    return f"      {{{tag}, 0, {{.{member} = a->{name}}}}},"
