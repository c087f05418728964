/* Copies of inputs that are used again (client/session/kept.py): which one an input has, and whether that is as the input is now. After
   _call_key.h, whose helpers it uses. The interpreter's lock is held all the time: a copy that holds has not been made anew meanwhile. */

#include <sys/ioctl.h>

enum { KEPT_NBYTES, KEPT_COPY, KEPT_START, KEPT_END, KEPT_PAGEMAP, KEPT_SKIPS, KEPT_USES, KEPT_WORDS };
static const uint64_t KEPT_LEAST_BYTES = 64 << 10;

/* Of linux/fs.h, which may be older. */
typedef struct { uint64_t size, flags, start, end, walk_end, found, found_count, max_pages, inverted, mask, any_of, returned; } PageScan;
enum { SCAN_CHECKED = 2, PAGE_WRITTEN = 2 };
#define SCAN_PAGES _IOWR('f', 16, PageScan)

static int is_unwritten(const uint64_t *row, uint64_t address) {
    uint64_t found[3], start = row[KEPT_START], end = row[KEPT_END], last = address + row[KEPT_NBYTES];
    if (!end) return 1; /* nobody can change it */
    PageScan scan = {sizeof scan, SCAN_CHECKED, start, end, 0, (uint64_t)found, 1, 1, 0, PAGE_WRITTEN, 0, PAGE_WRITTEN};
    if (start < address || end < start || last < end || ioctl((int)row[KEPT_PAGEMAP], SCAN_PAGES, &scan)) return 0;
    return !memcmp((void *)address, (void *)row[KEPT_COPY], start - address) &&
           !memcmp((void *)end, (void *)(row[KEPT_COPY] + (end - address)), last - end);
}

/* What an entry says of an input: 1 and its copy, 2 for one that serves for the first time, 0 for none, -1 when it is to be asked anew. */
static int ask_entry(PyObject *entry, uint64_t address, uint64_t nbytes, uint64_t *copy) {
    PyObject *words = PyObject_GetAttr(entry, s_row);
    Py_buffer view;
    int answer = -1;
    if (!words || PyObject_GetBuffer(words, &view, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
    } else {
        uint64_t *row = view.buf;
        if (view.len == 8 * KEPT_WORDS && row[KEPT_NBYTES] == nbytes) {
            if (row[KEPT_COPY] && is_unwritten(row, address))
                answer = row[KEPT_USES]++ ? 1 : 2, *copy = row[KEPT_COPY];
            else if (!row[KEPT_COPY] && row[KEPT_SKIPS])
                answer = 0, row[KEPT_SKIPS]--;
        }
        PyBuffer_Release(&view);
    }
    Py_XDECREF(words);
    return answer;
}

/* The copy of an input, 0 where there is none; whether it served before, -1 after an error. `memory` keeps it, and `told` is for the
   report; both are new references, or NULL. Raises what describing the input raises. */
static int find_copy(PyObject *kept, PyObject *input, uint64_t address, uint64_t nbytes, uint64_t *copy, PyObject **memory, PyObject **told) {
    *copy = 0, *memory = *told = NULL;
    if (nbytes < KEPT_LEAST_BYTES) return 0;
    PyObject *entries = PyObject_GetAttr(kept, s_entries), *number = PyLong_FromUnsignedLongLong(address);
    PyObject *entry = entries && number ? PyDict_GetItemWithError(entries, number) : NULL;
    Py_XINCREF(entry);
    Py_XDECREF(number);
    Py_XDECREF(entries);
    int answer = entry ? ask_entry(entry, address, nbytes, copy) : -1;
    if (answer < 0 && !PyErr_Occurred()) {
        Py_XDECREF(entry);
        entry = PyObject_CallMethodObjArgs(kept, s_look, input, NULL);
        answer = entry && entry != Py_None ? ask_entry(entry, address, nbytes, copy) : 0;
    }
    if (answer > 0 && !(*memory = PyObject_GetAttr(entry, s_memory))) *copy = 0;
    if (entry && entry != Py_None && !PyErr_Occurred()) *told = PyObject_GetAttr(entry, s_told);
    Py_XDECREF(entry);
    return PyErr_Occurred() ? -1 : answer == 1;
}
