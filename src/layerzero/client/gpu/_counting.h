/* Calls that pass the broker by, counted by the C of Python's client, under the interpreter's lock. After _call_key.h. */

#include "../../ipc/shm/_counters.h"

/* A call that has ended just now. `start_ns` is a number of Python's. */
static void count_call(uint64_t row, PyObject *start_ns, uint64_t end_ns, uint64_t copied_bytes) {
    uint64_t since = row ? PyLong_AsUnsignedLongLong(start_ns) : 0;
    if (PyErr_Occurred()) PyErr_Clear(); /* no clock gives such a number */
    else count_calls(row, end_ns > since ? end_ns - since : 0, copied_bytes, 1);
}
