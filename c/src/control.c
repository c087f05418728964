#include "client.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { NONCE_BYTES = 32, MIN_SECRET_BYTES = 16, MAX_SECRET_BYTES = 4096, TRIES = 3, MAX_FDS = 253 };
enum { TIMEOUT_S = 10, CONNECT_S = 10, REDIRECT_S = 40, MAX_TIMEOUT_S = 86400 };
enum { WELCOME_ENDPOINT = 4, WELCOME_MAC = 9 }; /* places of fields in messages, as in message.c */

/* --- messages ----------------------------------------------------------------------------------------------------- */

lz_code lzi_lost(lz_error *error) {
    return lzi_fail(error, LZ_BROKER_LOST,
                    "Start a broker with `lz up`, close this client and connect again.\n"
                    "The broker has hung up");
}

lz_code lzi_control_send(int control, const lzi_bytes *message, int fd, lz_error *error) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof fd)];
    } along = {0};
    struct iovec part = {message->data, message->nbytes};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (message->have_failed)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a message");
    if (fd >= 0) {
        packet.msg_control = along.bytes;
        packet.msg_controllen = sizeof along.bytes;
        struct cmsghdr *first = CMSG_FIRSTHDR(&packet);
        *first = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
        memcpy(CMSG_DATA(first), &fd, sizeof fd);
    }
    while (sendmsg(control, &packet, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            return lzi_lost(error);
    return LZ_OK;
}

void lzi_drop(lzi_passed *passed) {
    while (passed->count)
        close(passed->fds[--passed->count]);
}

/* The descriptors that a packet has brought go to `passed`; those that there is no room for are closed. */
static void take_descriptors(struct msghdr *packet, lzi_passed *passed) {
    for (struct cmsghdr *at = CMSG_FIRSTHDR(packet); at; at = CMSG_NXTHDR(packet, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= at->cmsg_len; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (passed && passed->count < LZI_MAX_PASSED)
                passed->fds[passed->count++] = fd;
            else
                close(fd);
        }
    }
}

lz_code lzi_control_receive(int control, lzi_pool *pool, int flags, lzi_value *value, lzi_passed *passed,
                            lz_error *error) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } along;
    char *data = malloc(LZI_MAX_CONTROL_BYTES);
    if (!data)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a message");
    struct iovec part = {data, LZI_MAX_CONTROL_BYTES};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = along.bytes};
    ssize_t nbytes;
    int resets = 0; /* one says that the broker has not read all of ours; what it had sent before is still there */
    do {
        packet.msg_controllen = sizeof along.bytes;
        nbytes = recvmsg(control, &packet, flags | MSG_CMSG_CLOEXEC);
    } while (nbytes < 0 && (errno == EINTR || (errno == ECONNRESET && !resets++)));
    lz_code code = LZ_OK;
    const char *wrong = NULL;
    if (nbytes >= 0)
        take_descriptors(&packet, passed);
    if (nbytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && !flags)
        code = lzi_fail(error, LZ_BROKER_LOST,
                        "Let the broker go on if it was stopped, or end it with lz down --force "
                        "and start another with lz up.\nIt has not answered for some time");
    else if (nbytes <= 0)
        code = lzi_lost(error);
    else if (packet.msg_flags & MSG_TRUNC || (wrong = lzi_decode(pool, data, (size_t)nbytes, value)))
        code = lzi_fail(error, LZ_BAD_MESSAGE,
                        "Report this: the broker broke the protocol.\nIt sent a control message "
                        "that is no such thing: %s",
                        wrong ? wrong : "it is too long");
    free(data);
    return code;
}

/* Whether it is well formed and says something of what was shown: maybe of what was given up before. */
static const lzi_message *answer_of(const lzi_value *said, lzi_value fields[LZI_MAX_FIELDS], const char **wrong) {
    static const lzi_message *const ANSWERS[] = {&lzi_arena_added, &lzi_lane_added, &lzi_counters_added};
    for (size_t i = 0; i < sizeof ANSWERS / sizeof *ANSWERS; i++)
        if (lzi_is_text(lzi_get(said, "kind"), ANSWERS[i]->kind)) {
            *wrong = lzi_read_message(ANSWERS[i], said, fields);
            return ANSWERS[i];
        }
    *wrong = "a message of a kind that is not expected here";
    return NULL;
}

lz_code lzi_show(lzi_memory *memory, const lzi_shown *shown, lzi_value answer[LZI_MAX_FIELDS], lzi_passed *passed,
                 lz_error *error) {
    lzi_bytes message = {0};
    lzi_pool pool = {0};
    int control = memory->control;
    lzi_encode_message(&message, shown->message, shown->fields);
    pthread_mutex_lock(&memory->asking);
    lz_code code = lzi_control_send(control, &message, shown->fd, error);
    lzi_bytes_free(&message);
    for (bool is_ours = false; !code && !is_ours;) {
        lzi_value said;
        if (passed)
            lzi_drop(passed); /* of a late answer to one that was given up */
        code = lzi_control_receive(control, &pool, 0, &said, passed, error);
        if (code)
            break;
        if (lzi_is_text(lzi_get(&said, "kind"), lzi_refused.kind)) {
            code = lzi_fail_as(error, lzi_get(&said, "error"));
            break;
        }
        const char *wrong;
        const lzi_message *kind = answer_of(&said, answer, &wrong);
        if (wrong)
            code = lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIts answer to %s: %s",
                            shown->message->kind, wrong);
        is_ours = kind == shown->answer &&
                  (!shown->is_numbered || answer[0].as.integer == shown->fields[0].as.integer);
    }
    pthread_mutex_unlock(&memory->asking);
    if (code && passed)
        lzi_drop(passed);
    lzi_pool_free(&pool);
    return code;
}

static lz_code send_fields(int control, const lzi_message *message, const lzi_value *fields, lz_error *error) {
    lzi_bytes bytes = {0};
    lzi_encode_message(&bytes, message, fields);
    lz_code code = lzi_control_send(control, &bytes, -1, error);
    lzi_bytes_free(&bytes);
    return code;
}

/* --- secret ------------------------------------------------------------------------------------------------------- */

typedef struct secret {
    bool is_there;
    size_t begin, nbytes;
    char text[MAX_SECRET_BYTES + 1];
} secret;

static bool is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static lz_code read_secret(const char *file, secret *found, lz_error *error) {
    found->is_there = false;
    if (!file || !*file)
        return LZ_OK;
    struct stat info;
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t nbytes = -1;
    if (fd >= 0 && !fstat(fd, &info))
        nbytes = read(fd, found->text, sizeof found->text);
    int reason = errno;
    if (fd >= 0)
        close(fd);
    if (nbytes < 0)
        return lzi_fail(error, LZ_CONFIG,
                        "Name a file that can be read as the secret; `lz keys secret` makes one.\n"
                        "%s: %s",
                        file, strerror(reason));
    bool is_ours = info.st_uid == getuid();
    if (!S_ISREG(info.st_mode) || (!is_ours && info.st_uid) || info.st_mode & (is_ours ? 077 : 022))
        return lzi_fail(error, LZ_CONFIG,
                        "Make the secret file readable for its owner alone: chmod 0600 %s\n"
                        "It has owner %u and mode %04o",
                        file, (unsigned)info.st_uid, info.st_mode & 07777u);
    size_t begin = 0, end = (size_t)nbytes;
    while (begin < end && is_space(found->text[begin]))
        begin++;
    while (end > begin && is_space(found->text[end - 1]))
        end--;
    if (end - begin < MIN_SECRET_BYTES || end - begin > MAX_SECRET_BYTES)
        return lzi_fail(error, LZ_CONFIG,
                        "Name a secret file of %d to %d bytes; `lz keys secret` makes one.\n"
                        "%s holds %zu",
                        MIN_SECRET_BYTES, MAX_SECRET_BYTES, file, end - begin);
    found->begin = begin;
    found->nbytes = end - begin;
    found->is_there = true;
    return LZ_OK;
}

static void prove(const secret *key, const char *side, const uint8_t *ours, const char *brokers, uint8_t *mac) {
    static const char PURPOSE[] = "layerzero control 1", ROLE[] = "client";
    lzi_bytes text = {0};
    lzi_put(&text, PURPOSE, sizeof PURPOSE);
    lzi_put(&text, side, strlen(side) + 1);
    lzi_put(&text, ROLE, sizeof ROLE);
    lzi_put(&text, ours, NONCE_BYTES);
    lzi_put(&text, brokers, NONCE_BYTES);
    lzi_hmac_sha256(key->text + key->begin, key->nbytes, text.data, text.nbytes, mac);
    lzi_bytes_free(&text);
}

static bool is_equal(const uint8_t *one, const lzi_value *other) {
    unsigned different = other->count != LZI_SHA256_BYTES;
    for (unsigned i = 0; !different && i < LZI_SHA256_BYTES; i++)
        different |= one[i] ^ (uint8_t)other->as.bytes[i];
    return !different;
}

/* --- the way there ------------------------------------------------------------------------------------------------ */

static lz_code find_folder(const lz_connect_options *options, bool is_shared, char *path, size_t room,
                           lz_error *error) {
    const char *folder = options->runtime_dir, *base;
    if (!folder || !*folder)
        folder = getenv("LAYERZERO_RUNTIME_DIR");
    int nbytes;
    if (folder && *folder)
        nbytes = snprintf(path, room, "%s", folder);
    else if ((base = getenv("XDG_RUNTIME_DIR")) && *base)
        nbytes = snprintf(path, room, "%s/layerzero", base);
    else
        nbytes = snprintf(path, room, "/tmp/layerzero-%u", (unsigned)getuid());
    if (!strncmp(path, "tcp:", 4))
        return lzi_fail(error, LZ_CONFIG,
                        "Name a folder of unix sockets: they carry memory, which tcp cannot.\n"
                        "The runtime folder is %s",
                        path);
    if (nbytes < 0 || (size_t)nbytes + sizeof "/client-0123456789abcdef" > room)
        return lzi_fail(error, LZ_CONFIG,
                        "Set LAYERZERO_RUNTIME_DIR to a shorter folder: names of unix sockets have "
                        "at most 107 bytes.\nThe runtime folder is %.100s...",
                        path);
    struct stat info;
    if (lstat(path, &info))
        return lzi_fail(error, LZ_NOT_CONNECTED,
                        "Start a broker with `lz up`, or name its folder in "
                        "LAYERZERO_RUNTIME_DIR.\nThe runtime folder %s: %s",
                        path, strerror(errno));
    bool is_safe = is_shared ? !(info.st_mode & 02) : info.st_uid == getuid() && !(info.st_mode & 077);
    if (!S_ISDIR(info.st_mode) || !is_safe)
        return lzi_fail(error, LZ_CONFIG,
                        "Make the runtime folder yours alone: chmod 0700 %s; or set "
                        "LAYERZERO_RUNTIME_DIR to another.\nIt has owner %u and mode %04o",
                        path, (unsigned)info.st_uid, info.st_mode & 07777u);
    strcat(path, "/broker.sock"); /* shorter than the name that there is room for */
    return LZ_OK;
}

static void limit_waiting(int control, int seconds) {
    struct timeval time = {.tv_sec = seconds};
    setsockopt(control, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    setsockopt(control, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
}

static lz_code open_control(const char *path, int *control, lz_error *error) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return lzi_fail(error, LZ_BAD_MESSAGE,
                        "Report this: the broker broke the protocol.\nIt sends us to a path that "
                        "is too long for a socket: %.200s",
                        path);
    strcpy(address.sun_path, path);
    *control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (*control < 0)
        return lzi_fail(error, LZ_NOT_CONNECTED,
                        "Allow this process more file descriptors, then connect again.\n"
                        "No socket could be made: %s",
                        strerror(errno));
    limit_waiting(*control, CONNECT_S);
    int failed;
    while ((failed = connect(*control, (struct sockaddr *)&address, sizeof address)) && errno == EINTR)
        ;
    if (!failed)
        return LZ_OK;
    lz_code code = lzi_fail(error, LZ_NOT_CONNECTED,
                            "Start a broker with `lz up`, or name its folder in "
                            "LAYERZERO_RUNTIME_DIR.\nNobody listens at %s: %s",
                            path, strerror(errno));
    close(*control);
    *control = -1;
    return code;
}

static bool is_of(const lzi_message *message, const lzi_value *value) {
    return lzi_is_text(lzi_get(value, "kind"), message->kind);
}

/* Say hello. `redirect`: where to go on, "" when this is the broker. */
static lz_code greet(int control, const secret *key, lzi_welcome_kept *kept, const char **redirect, lz_error *error) {
    uint8_t nonce[NONCE_BYTES], proof[LZI_SHA256_BYTES], expected[LZI_SHA256_BYTES];
    lzi_value protocol = lzi_int(LZI_PROTOCOL), answer, fields[LZI_MAX_FIELDS];
    lzi_pool *pool = &kept->pool;
    bool is_proved = false;
    if (key->is_there && getrandom(nonce, sizeof nonce, 0) != sizeof nonce)
        return lzi_fail(error, LZ_NOT_CONNECTED, "Connect again.\nThe kernel gave no random bytes");
    lzi_value none = lzi_data("", 0), empty = lzi_text("");
    lzi_value hello[] = {{.type = LZI_LIST, .count = 1, .as.items = &protocol},
                         lzi_text("client"),
                         lzi_text("c"),
                         lzi_int(getpid()),
                         none,
                         key->is_there ? lzi_data(nonce, sizeof nonce) : none,
                         empty,
                         empty,
                         empty};
    lz_code code = send_fields(control, &lzi_hello, hello, error);
    if (!code)
        code = lzi_control_receive(control, pool, 0, &answer, NULL, error);
    if (!code && is_of(&lzi_challenge, &answer)) {
        if (!key->is_there)
            return lzi_fail(error, LZ_NOT_ALLOWED,
                            "Name the file of the stack's secret in LAYERZERO_SECRET_FILE.\n"
                            "The broker asks for it");
        const char *wrong = lzi_read_message(&lzi_challenge, &answer, fields);
        if (wrong || fields[0].count != NONCE_BYTES)
            return lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIts challenge: %s",
                            wrong ? wrong : "not 32 bytes");
        prove(key, "peer", nonce, fields[0].as.bytes, proof);
        prove(key, "broker", nonce, fields[0].as.bytes, expected);
        is_proved = true;
        lzi_value mac = lzi_data(proof, sizeof proof);
        limit_waiting(control, REDIRECT_S);
        code = send_fields(control, &lzi_proof, &mac, error);
        if (!code)
            code = lzi_control_receive(control, pool, 0, &answer, NULL, error);
    }
    if (code)
        return code;
    if (is_of(&lzi_refused, &answer))
        return lzi_fail_as(error, lzi_get(&answer, "error"));
    bool is_redirect = is_of(&lzi_redirect, &answer);
    const char *wrong = lzi_read_message(is_redirect ? &lzi_redirect : &lzi_welcome, &answer, fields);
    if (wrong)
        return lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIts answer to hello: %s",
                        wrong);
    if (key->is_there && !(is_proved && is_equal(expected, &fields[is_redirect ? 1 : WELCOME_MAC])))
        return lzi_fail(error, LZ_NOT_ALLOWED,
                        "Start the broker with this stack's --secret-file, or leave "
                        "LAYERZERO_SECRET_FILE out.\nThe broker has not proved that it knows the secret");
    if (is_redirect) {
        *redirect = fields[0].as.bytes;
        return LZ_OK;
    }
    *redirect = "";
    kept->broker_pid = fields[3].as.integer;
    kept->endpoint = fields[WELCOME_ENDPOINT];
    kept->identity = fields[5];
    kept->max_in_flight = fields[7].as.integer;
    kept->timeout_s = fields[8].as.number;
    kept->has_joined = fields[10].as.is_true;
    kept->counts = fields[11].as.is_true;
    if (fields[0].as.integer != LZI_PROTOCOL)
        return lzi_fail(error, LZ_VERSION_MISMATCH,
                        "Use a library and a broker of one version.\nThe broker speaks "
                        "protocol %lld, this library %d",
                        (long long)fields[0].as.integer, LZI_PROTOCOL);
    if (kept->max_in_flight < 1 || kept->max_in_flight > 1 << 20 ||
        !(kept->timeout_s > 0 && kept->timeout_s <= MAX_TIMEOUT_S))
        return lzi_fail(error, LZ_BAD_MESSAGE,
                        "Report this: the broker broke the protocol.\nIts welcome allows nothing, or calls of "
                        "more than a day");
    return LZ_OK;
}

lz_code lzi_reach(const lz_connect_options *options, int *control, lzi_welcome_kept *welcome, lz_error *error) {
    secret key;
    char path[sizeof((struct sockaddr_un *)0)->sun_path];
    const char *file = options->secret_file ? options->secret_file : getenv("LAYERZERO_SECRET_FILE"), *redirect = "";
    lz_code code = read_secret(file, &key, error);
    if (!code)
        code = find_folder(options, key.is_there, path, sizeof path, error);
    if (code)
        return code;
    for (unsigned steps = 0; steps < 2 * TRIES; steps++) {
        bool is_sent_on = *redirect;
        code = open_control(is_sent_on ? redirect : path, control, error);
        if (!code) {
            const char *next = "";
            code = greet(*control, &key, welcome, &next, error);
            if (!code && !*next) {
                limit_waiting(*control, TIMEOUT_S);
                return LZ_OK;
            }
            close(*control);
            *control = -1;
            redirect = code || is_sent_on ? "" : next;
            if (!code && is_sent_on)
                break;
        } else {
            redirect = "";
        }
        /* Who is sent on and finds nobody comes back, and asks again. */
        if (code && !(is_sent_on && (code == LZ_NOT_CONNECTED || code == LZ_BROKER_LOST)))
            return code;
    }
    return code ? code
                : lzi_fail(error, LZ_BAD_MESSAGE,
                           "Report this: the broker broke the protocol.\nIt sends us from "
                           "one broker to the next");
}
