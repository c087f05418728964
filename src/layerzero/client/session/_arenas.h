/* The pool's arenas (client/connection/arena.py), in which addresses are looked up without it, and references to memory there. */

typedef struct { uint64_t address, nbytes, number; } Arena; /* number 0: the broker does not know it */
typedef struct {
    PyObject *addresses; /* the pool's list of them, of which `table` was made; arenas that go are not kept */
    Arena *table;
    Py_ssize_t count;
} Arenas;

static void forget_arenas(Arenas *self) {
    Py_CLEAR(self->addresses);
    free(self->table);
    self->table = NULL, self->count = 0;
}

/* The arenas as they are now, in the order of their addresses. `read` gives (addresses, bytes of a table). */
static Verdict see_arenas(Arenas *self, PyObject *pool, PyObject *read) {
    PyObject *index = PyObject_GetAttr(pool, s_index), *addresses = index ? PyTuple_GetItem(index, 0) : NULL;
    Py_XDECREF(index);
    if (!addresses || addresses == self->addresses) return addresses ? PLAIN : FAILED;
    PyObject *found = PyObject_CallNoArgs(read);
    char *bytes;
    Py_ssize_t nbytes;
    if (!found) return FAILED;
    Arena *table = NULL;
    if (PyTuple_Check(found) && PyTuple_Size(found) == 2 && PyBytes_AsStringAndSize(PyTuple_GetItem(found, 1), &bytes, &nbytes) == 0 &&
        (table = malloc((size_t)nbytes + 1))) {
        memcpy(table, bytes, (size_t)nbytes);
        forget_arenas(self);
        self->table = table, self->count = nbytes / (Py_ssize_t)sizeof *table;
        self->addresses = PyTuple_GetItem(found, 0);
        Py_INCREF(self->addresses);
    }
    Py_DECREF(found);
    if (!table && !PyErr_Occurred()) PyErr_NoMemory();
    return table ? PLAIN : FAILED;
}

/* The arena that an address lies in; one of address 0 where there is none. */
static Arena arena_of(const Arenas *self, uint64_t address) {
    Py_ssize_t low = 0, high = self->count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (self->table[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    if (low && address - self->table[low - 1].address < self->table[low - 1].nbytes) return self->table[low - 1];
    return (Arena){0, 0, 0};
}

typedef struct { uint32_t arena, unused; uint64_t offset, nbytes; } Ref;
_Static_assert(sizeof(Ref) == REF_BYTES, "as REF of ipc/transport/wire.py");

static Ref ref_in(Arena arena, uint64_t address, uint64_t nbytes) {
    return (Ref){(uint32_t)arena.number, 0, address - arena.address, nbytes};
}

static int fits(Arena arena, uint64_t address, uint64_t nbytes) {
    return arena.number && address - arena.address <= arena.nbytes && nbytes <= arena.nbytes - (address - arena.address);
}
