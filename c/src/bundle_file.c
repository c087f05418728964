#include "bundle_file.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FORMAT = 1,
    HEAD_BYTES = 48,
    ALIGNMENT = 64,
    MAX_MANIFEST_BYTES = 1 << 20,
    MAX_PLAN_BYTES = 16 << 20,
    MAX_LOCK_BYTES = 1 << 20,
    MAX_PARTS = 66,
    MAX_STEPS = 4096,
    MAX_PLACES = 1 << 16,
    STEP_FIELDS = 13,
    MAX_CHARACTERS = 400,
    PIECE = 1 << 20
};
static const uint64_t MOST = (uint64_t)1 << 46;
static const char NO_MEMORY[] = "there is no memory for it";

static const lzi_message MANIFEST = {"bundle",
                                     {{"name", LZI_TEXT, false, NULL},
                                      {"made_by", LZI_TEXT, false, NULL},
                                      {"made_s", LZI_FLOAT, false, NULL},
                                      {"environments", LZI_LIST, false, NULL},
                                      {"parts", LZI_LIST, false, NULL}}};
static const lzi_message PLAN = {"bundle_plan",
                                 {{"homes", LZI_LIST, false, NULL},
                                  {"tensors", LZI_LIST, false, NULL},
                                  {"inputs", LZI_LIST, false, NULL},
                                  {"outputs", LZI_LIST, false, NULL},
                                  {"result", LZI_MAP, false, NULL},
                                  {"steps", LZI_LIST, false, NULL},
                                  {"slot_bytes", LZI_INT, false, NULL},
                                  {"constant_bytes", LZI_INT, false, NULL}}};

typedef struct part {
    const char *name;
    uint64_t offset, nbytes;
    const char *sha256;
} part;

/* What is read, while it is. */
typedef struct reading {
    const char *path;
    int fd;
    lzi_bundle_file *file;
    lz_error *error;
    uint64_t nbytes; /* of the file */
    const part *plan, *constants;
    part parts[MAX_PARTS];
    uint32_t part_count, home_count, place_count;
    lzi_place *places;
    bool *is_written; /* of each home */
} reading;

static lz_code damaged(reading *now, const char *what, const char *why) {
    return lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                    "Write the bundle again, or copy it again: %s is damaged.\nIts %s: %s", now->path, what, why);
}

static lz_code no_memory(reading *now) {
    return lzi_fail(now->error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a bundle");
}

static uint32_t read_u32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* False where the file ends before, or cannot be read. */
static bool read_at(int fd, uint64_t offset, void *to, uint64_t nbytes) {
    for (uint64_t done = 0; done < nbytes;) {
        ssize_t got = pread(fd, (char *)to + done, nbytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (uint64_t)got;
    }
    return true;
}

static bool is_digest(const void *data, size_t nbytes, const void *sha256) {
    lzi_sha256 hash;
    uint8_t digest[LZI_SHA256_BYTES];
    lzi_sha256_begin(&hash);
    lzi_sha256_add(&hash, data, nbytes);
    lzi_sha256_end(&hash, digest);
    return !memcmp(digest, sha256, sizeof digest);
}

static uint64_t aligned(uint64_t nbytes) {
    return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* --- values ------------------------------------------------------------------------------------------------------- */

/* The items of a list of so many; NULL: it is none. */
static const lzi_value *list_of(const lzi_value *value, uint32_t count) {
    return value->type == LZI_LIST && value->count == count ? value->as.items : NULL;
}

static bool read_count(const lzi_value *value, uint64_t most, uint64_t *to) {
    if (value->type != LZI_INT || value->as.integer < 0 || (uint64_t)value->as.integer > most)
        return false;
    *to = (uint64_t)value->as.integer;
    return true;
}

static bool is_text(const lzi_value *value) {
    return value->type == LZI_TEXT && value->count <= 4 * MAX_CHARACTERS && strlen(value->as.bytes) == value->count;
}

/* Of a backend, a kernel or an environment: ASCII. */
static bool is_name(const lzi_value *value) {
    bool is_one = is_text(value) && value->count <= MAX_CHARACTERS;
    for (uint32_t i = 0; is_one && i < value->count; i++)
        is_one = !(value->as.bytes[i] & 0x80);
    return is_one;
}

/* --- the manifest ------------------------------------------------------------------------------------------------- */

static const char *read_parts(reading *now, const lzi_value *list, uint64_t at) {
    if (!list->count || list->count > MAX_PARTS)
        return "it has too many parts, or none";
    for (uint32_t i = 0; i < list->count; i++) {
        const lzi_value *row = list_of(&list->as.items[i], 4);
        part *to = &now->parts[i];
        if (!row || !is_text(&row[0]) || !read_count(&row[1], 2 * MOST, &to->offset) ||
            !read_count(&row[2], MOST, &to->nbytes) || row[3].type != LZI_BYTES || row[3].count != LZI_SHA256_BYTES)
            return "a part has not a name, offset, bytes and SHA-256";
        to->name = row[0].as.bytes;
        to->sha256 = row[3].as.bytes;
        bool is_plan = !strcmp(to->name, "plan"), is_constants = !strcmp(to->name, "constants");
        if (!is_plan && !is_constants && (strncmp(to->name, "lock/", 5) || !to->name[5]))
            return "it has a part of an unknown name";
        uint64_t most = is_plan ? MAX_PLAN_BYTES : is_constants ? MOST : MAX_LOCK_BYTES;
        if (to->offset != aligned(at) || to->nbytes > most)
            return "a part does not lie behind the part before it, or is too large";
        for (uint32_t j = 0; j < i; j++)
            if (!strcmp(now->parts[j].name, to->name))
                return "it has a part twice";
        at = to->offset + to->nbytes;
        now->plan = is_plan ? to : now->plan;
        now->constants = is_constants ? to : now->constants;
    }
    now->part_count = list->count;
    return now->plan ? NULL : "it has no plan";
}

static const char *read_environments(reading *now, const lzi_value *list) {
    lz_bundle_info *info = &now->file->info;
    lz_bundle_environment *made =
        list->count <= MAX_PARTS ? lzi_take(&now->file->pool, (list->count + 1) * sizeof *made) : NULL;
    if (!made)
        return "it has too many environments";
    for (uint32_t i = 0; i < list->count; i++) {
        const lzi_value *row = list_of(&list->as.items[i], 2);
        if (!row || !is_name(&row[0]) || !is_name(&row[1]))
            return "an environment has not a backend and an id";
        made[i] = (lz_bundle_environment){sizeof *made, row[0].as.bytes, row[1].as.bytes};
    }
    info->environments = made;
    info->environment_count = list->count;
    return NULL;
}

static lz_code read_manifest(reading *now) {
    uint8_t head[HEAD_BYTES];
    lzi_value fields[LZI_MAX_FIELDS];
    lzi_bundle_file *file = now->file;
    if (!read_at(now->fd, 0, head, sizeof head) || memcmp(head, "LZBUNDLE", 8))
        return lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                        "Name a file that lz.write_bundle or `lz bundle write` has written.\n%s is no bundle",
                        now->path);
    uint32_t format = read_u32(head + 8), nbytes = read_u32(head + 12);
    if (format != FORMAT)
        return lzi_fail(now->error, LZ_VERSION_MISMATCH,
                        "Write the bundle again with this version, or use the library of its writer.\n"
                        "%s has format %u, this library reads %d",
                        now->path, format, FORMAT);
    void *data = nbytes <= MAX_MANIFEST_BYTES ? lzi_take(&file->pool, nbytes) : NULL;
    if (!data || !read_at(now->fd, HEAD_BYTES, data, nbytes) || !is_digest(data, nbytes, head + 16))
        return damaged(now, "manifest", "it has other bytes than its SHA-256 says");
    const char *wrong = lzi_decode_message(&file->pool, &MANIFEST, data, nbytes, fields);
    if (!wrong)
        wrong = read_environments(now, &fields[3]);
    if (!wrong)
        wrong = read_parts(now, &fields[4], HEAD_BYTES + (uint64_t)nbytes);
    if (wrong)
        return damaged(now, "manifest", wrong);
    file->info.name = fields[0].as.bytes;
    file->info.made_by = fields[1].as.bytes;
    file->info.made_s = fields[2].as.number;
    const part *last = &now->parts[now->part_count - 1];
    if (last->offset + last->nbytes != now->nbytes)
        return damaged(now, "end", "the file ends elsewhere than its last part");
    if (now->constants) {
        file->constants_at = now->constants->offset;
        memcpy(file->constants_sha256, now->constants->sha256, sizeof file->constants_sha256);
    }
    return LZ_OK;
}

/* --- the plan ----------------------------------------------------------------------------------------------------- */

static const char *read_homes(reading *now, const lzi_value *list, uint64_t inputs, uint64_t outputs) {
    static const char *const KINDS[] = {"input", "output", "slot", "constant"};
    const lz_bundle_info *info = &now->file->info;
    uint64_t ends[] = {inputs, outputs, info->slot_bytes, info->constant_bytes};
    if (list->count > MAX_PLACES)
        return "it has too many homes";
    lzi_home *made = lzi_take(&now->file->pool, (list->count + 1) * sizeof *made);
    now->is_written = lzi_take(&now->file->pool, list->count + 1);
    if (!made || !now->is_written)
        return NO_MEMORY;
    for (uint32_t i = 0; i < list->count; i++) {
        const lzi_value *row = list_of(&list->as.items[i], 3);
        lzi_home *to = &made[i];
        uint64_t end;
        int kind = 0;
        while (row && kind < 4 && !lzi_is_text(&row[0], KINDS[kind]))
            kind++;
        if (!row || kind == 4 || !read_count(&row[1], MOST, &to->place) || !read_count(&row[2], MOST, &to->nbytes) ||
            !to->nbytes)
            return "memory has not a kind, place and bytes";
        to->kind = (lzi_home_kind)kind;
        bool is_callers = to->kind <= LZI_HOME_OUTPUT;
        end = to->place + (is_callers ? 1 : to->nbytes);
        if (end > ends[kind] || (!is_callers && to->place % ALIGNMENT))
            return "memory lies outside of what there is";
        now->is_written[i] = to->kind == LZI_HOME_INPUT || to->kind == LZI_HOME_CONSTANT;
    }
    now->file->homes = made;
    now->home_count = list->count;
    return NULL;
}

static const char *read_places(reading *now, const lzi_value *list) {
    lzi_pool *pool = &now->file->pool;
    if (list->count > MAX_PLACES)
        return "it has too many tensors";
    now->places = lzi_take(pool, (list->count + 1) * sizeof *now->places);
    if (!now->places)
        return NO_MEMORY;
    for (uint32_t i = 0; i < list->count; i++) {
        const lzi_value *row = list_of(&list->as.items[i], 5);
        lzi_place *to = &now->places[i];
        uint64_t home;
        if (!row || !read_count(&row[0], UINT32_MAX, &home) || !read_count(&row[1], MOST, &to->offset) ||
            !lzi_tensor_of(pool, row + 2, &to->tensor, &to->nbytes))
            return "a tensor has not a home, offset, dtype, shape and strides";
        to->home = (uint32_t)home;
        if (home >= now->home_count || !to->nbytes || to->offset + to->nbytes > now->file->homes[home].nbytes)
            return "a tensor lies outside of its memory";
    }
    now->place_count = list->count;
    return NULL;
}

static bool is_row_major(const lzi_place *place) {
    lzi_tensor tensor;
    return !lzi_read_tensors(&place->tensor, 1, "tensor", &tensor, NULL) && lzi_is_row_major(&tensor);
}

/* The inputs or outputs. */
static const char *read_named(reading *now, const lzi_value *list, lzi_home_kind kind, const lzi_place ***places,
                              const lz_bundle_tensor **told) {
    lzi_pool *pool = &now->file->pool;
    const lzi_place **made = lzi_take(pool, (list->count + 1) * sizeof *made);
    lz_bundle_tensor *tensors = lzi_take(pool, (list->count + 1) * sizeof *tensors);
    if (!made || !tensors)
        return NO_MEMORY;
    for (uint32_t i = 0; i < list->count; i++) {
        const lzi_value *row = list_of(&list->as.items[i], 2);
        uint64_t number;
        if (!row || !is_text(&row[0]) || !read_count(&row[1], UINT32_MAX, &number) || number >= now->place_count)
            return "an input or output has not a name and a tensor";
        const lzi_place *place = made[i] = &now->places[number];
        const lzi_home *home = &now->file->homes[place->home];
        bool is_whole = home->kind == kind && home->place == i && !place->offset && place->nbytes == home->nbytes &&
                        is_row_major(place);
        if (!is_whole && (kind == LZI_HOME_INPUT || home->kind != LZI_HOME_SLOT))
            return "an input or output is not its memory";
        lzi_tensor checked;
        lzi_read_tensors(&place->tensor, 1, "tensor", &checked, NULL);
        tensors[i] = (lz_bundle_tensor){.struct_size = sizeof *tensors,
                                        .name = row[0].as.bytes,
                                        .dtype = place->tensor.dtype,
                                        .ndim = place->tensor.ndim,
                                        .shape = place->tensor.shape,
                                        .nbytes = lzi_dense_bytes(&checked)};
    }
    *places = made;
    *told = tensors;
    return NULL;
}

/* Tensors of a step by their numbers. */
static const char *read_tensors(reading *now, const lzi_value *list, bool may_lack, const lzi_place ***to) {
    if (list->type != LZI_LIST || list->count > LZI_MAX_TENSORS)
        return "a step has too many tensors";
    const lzi_place **made = lzi_take(&now->file->pool, (list->count + 1) * sizeof *made);
    if (!made)
        return NO_MEMORY;
    for (uint32_t i = 0; i < list->count; i++) {
        uint64_t number;
        if (may_lack && list->as.items[i].type == LZI_NIL)
            continue;
        if (!read_count(&list->as.items[i], UINT32_MAX, &number) || number >= now->place_count)
            return "a step has a tensor that there is not";
        made[i] = &now->places[number];
    }
    *to = made;
    return NULL;
}

static const char *read_attrs(reading *now, const lzi_value *map, lzi_step *step) {
    if (map->type != LZI_MAP || map->count > LZI_MAX_TENSORS)
        return "a step has too many attributes";
    lz_attr *made = lzi_take(&now->file->pool, (map->count + 1) * sizeof *made);
    if (!made)
        return NO_MEMORY;
    for (uint32_t i = 0; i < map->count; i++) {
        const lzi_value *name = &map->as.items[2 * i], *value = name + 1;
        made[i] = (lz_attr){.struct_size = sizeof *made, .name = name->as.bytes};
        if (value->type == LZI_BOOL)
            made[i].type = LZ_ATTR_BOOL, made[i].is_true = value->as.is_true;
        else if (value->type == LZI_INT)
            made[i].type = LZ_ATTR_INT, made[i].integer = value->as.integer;
        else if (value->type == LZI_FLOAT)
            made[i].type = LZ_ATTR_FLOAT, made[i].number = value->as.number;
        else if (is_text(value))
            made[i].type = LZ_ATTR_TEXT, made[i].text = value->as.bytes;
        else if (value->type != LZI_NIL)
            return "an attribute is no plain value";
    }
    step->attrs = made;
    step->attr_count = map->count;
    return NULL;
}

static const char *read_step(reading *now, const lzi_value *value, lzi_step *step) {
    const lzi_value *row = list_of(value, STEP_FIELDS);
    if (!row || !is_text(&row[0]) || !is_name(&row[5]) || !is_name(&row[6]) || row[7].type != LZI_BOOL ||
        !is_text(&row[9]))
        return "a step has not an op, backend, kernel and line";
    const char *wrong = read_tensors(now, &row[1], true, &step->inputs);
    if (!wrong)
        wrong = read_tensors(now, &row[2], false, &step->outputs);
    if (!wrong)
        wrong = read_attrs(now, &row[4], step);
    if (wrong)
        return wrong;
    step->op = row[0].as.bytes;
    step->backend = row[5].as.bytes;
    step->kernel = row[6].as.bytes;
    step->is_pinned = row[7].as.is_true;
    step->where = row[9].as.bytes;
    step->input_count = row[1].count;
    step->output_count = row[2].count;
    if (!step->output_count || step->input_count + step->output_count > LZI_MAX_TENSORS)
        return "a step has too many tensors, or no results";
    for (uint32_t i = 0; i < step->input_count; i++)
        if (step->inputs[i] && !now->is_written[step->inputs[i]->home])
            return "a step reads what nothing has written";
    for (uint32_t i = 0; i < step->output_count; i++) {
        const lzi_place *made = step->outputs[i];
        lzi_home_kind kind = now->file->homes[made->home].kind;
        if ((kind != LZI_HOME_OUTPUT && kind != LZI_HOME_SLOT) || made->offset)
            return "a step writes to what is not its own";
        now->is_written[made->home] = true;
    }
    return NULL;
}

static const char *read_steps(reading *now, const lzi_value *list) {
    lzi_bundle_file *file = now->file;
    if (!list->count || list->count > MAX_STEPS)
        return "it has too many steps, or none";
    lzi_step *made = lzi_take(&file->pool, list->count * sizeof *made);
    const char *wrong = made ? NULL : NO_MEMORY;
    for (uint32_t i = 0; !wrong && i < list->count; i++)
        wrong = read_step(now, &list->as.items[i], &made[i]);
    for (size_t i = 0; !wrong && i < file->info.output_count; i++)
        if (!now->is_written[file->outputs[i]->home])
            wrong = "it has an output that nothing has written";
    file->steps = made;
    file->info.step_count = list->count;
    return wrong;
}

static const char *read_content(reading *now, const void *data, size_t nbytes) {
    lzi_value fields[LZI_MAX_FIELDS];
    lzi_bundle_file *file = now->file;
    lz_bundle_info *info = &file->info;
    const char *wrong = lzi_decode_message(&file->pool, &PLAN, data, nbytes, fields);
    if (wrong)
        return wrong;
    if (!read_count(&fields[6], MOST, &info->slot_bytes) || !read_count(&fields[7], MOST, &info->constant_bytes))
        return "it has not bytes of slots and constants";
    if (info->constant_bytes != (now->constants ? now->constants->nbytes : 0))
        return "it takes other constants than there are";
    const lzi_value *inputs = &fields[2], *outputs = &fields[3];
    if (inputs->count > LZI_MAX_TENSORS || outputs->count > LZI_MAX_TENSORS)
        return "it has too many inputs or outputs";
    info->input_count = inputs->count;
    info->output_count = outputs->count;
    wrong = read_homes(now, &fields[0], inputs->count, outputs->count);
    if (!wrong)
        wrong = read_places(now, &fields[1]);
    if (!wrong)
        wrong = read_named(now, inputs, LZI_HOME_INPUT, &file->inputs, &info->inputs);
    if (!wrong)
        wrong = read_named(now, outputs, LZI_HOME_OUTPUT, &file->outputs, &info->outputs);
    return wrong ? wrong : read_steps(now, &fields[5]);
}

/* Whether a plan's calls are on a GPU, which this library has no memory of. */
static bool is_on_gpu(const void *data, size_t nbytes) {
    lzi_pool pool = {0};
    lzi_value value = {.type = LZI_NIL};
    bool is_so = !lzi_decode(&pool, data, nbytes, &value) && lzi_is_text(lzi_get(&value, "kind"), "bundle_gpu_plan");
    lzi_pool_free(&pool);
    return is_so;
}

/* Compare all parts but the constants, and read the plan. */
static lz_code read_all(reading *now) {
    const char *wrong = NULL;
    lz_code code = LZ_OK;
    for (uint32_t i = 0; !code && i < now->part_count; i++) {
        const part *one = &now->parts[i];
        if (one == now->constants)
            continue;
        void *data = malloc(one->nbytes + 1);
        if (!data)
            code = no_memory(now);
        else if (!read_at(now->fd, one->offset, data, one->nbytes) || !is_digest(data, one->nbytes, one->sha256))
            code = damaged(now, one->name, "it has other bytes than its SHA-256 says");
        else if (one == now->plan && is_on_gpu(data, one->nbytes))
            code = lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                            "Run it from Python: its calls are on a GPU, whose memory this library has none of.\n%s",
                            now->path);
        else if (one == now->plan && (wrong = read_content(now, data, one->nbytes)))
            code = damaged(now, one->name, wrong);
        free(data);
    }
    return code;
}

lz_code lzi_bundle_read(const char *path, int *fd, lzi_bundle_file *file, lz_error *error) {
    struct stat about;
    *fd = -1;
    *file = (lzi_bundle_file){.info.struct_size = sizeof file->info};
    if (!path || !*path)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Name the file of the bundle");
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0 || fstat(*fd, &about) || !S_ISREG(about.st_mode))
        return lzi_fail(error, LZ_INVALID_ARGUMENT,
                        "Name a file that lz.write_bundle or `lz bundle write` has written.\n%s: %s", path,
                        *fd < 0 ? strerror(errno) : "it is no regular file");
    reading *now = calloc(1, sizeof *now);
    if (!now)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a bundle");
    *now = (reading){.path = path, .fd = *fd, .file = file, .error = error, .nbytes = (uint64_t)about.st_size};
    lz_code code = read_manifest(now);
    if (!code)
        code = read_all(now);
    free(now);
    return code;
}

lz_code lzi_bundle_constants(const char *path, int fd, const lzi_bundle_file *file, void *to, lz_error *error) {
    reading now = {.path = path, .error = error};
    uint8_t digest[LZI_SHA256_BYTES];
    lzi_sha256 hash;
    lzi_sha256_begin(&hash);
    for (uint64_t at = 0, step; at < file->info.constant_bytes; at += step) {
        uint64_t rest = file->info.constant_bytes - at;
        step = rest < PIECE ? rest : PIECE;
        if (!read_at(fd, file->constants_at + at, (char *)to + at, step))
            return damaged(&now, "constants", "the file ends before them");
        lzi_sha256_add(&hash, (char *)to + at, step);
    }
    lzi_sha256_end(&hash, digest);
    return memcmp(digest, file->constants_sha256, sizeof digest)
               ? damaged(&now, "constants", "it has other bytes than its SHA-256 says")
               : LZ_OK;
}
