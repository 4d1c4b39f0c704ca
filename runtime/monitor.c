/*
 * csv_monitor and tensorboard of spw_monitor.h. An event is a protocol buffer: field numbers and wire types stand beside the bytes.
 */
#include "spw_monitor.h"
#include "spw_files.h"
#include <errno.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { TAG_BYTES_MAX = 200 };

struct spw_monitor {
    char csv[SPW_MONITOR_FOLDER_BYTES], tensorboard[SPW_MONITOR_FOLDER_BYTES]; /* folders; csv "": off */
    FILE *events;                                                              /* NULL: off */
};

/* ---------------------------------------------------------------- records */

/* Castagnoli's polynomial, bits reflected. */
static uint32_t
crc32c(const unsigned char *p, uint64_t n)
{
    uint32_t crc = ~0u;
    for (uint64_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
    }
    return ~crc;
}

static uint64_t
put_le(unsigned char *p, uint64_t x, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(x >> 8 * i);
    return bytes;
}

static uint64_t
put_checksum(unsigned char *to, const unsigned char *p, uint64_t n)
{
    uint32_t crc = crc32c(p, n);
    return put_le(to, (crc >> 15 | crc << 17) + 0xa282ead8u, 4);
}

static uint64_t
put_varint(unsigned char *p, uint64_t x)
{
    uint64_t n = 0;
    for (; x >= 128; x >>= 7)
        p[n++] = (unsigned char)(x | 128);
    p[n++] = (unsigned char)x;
    return n;
}

/* A field of bytes. */
static uint64_t
put_bytes(unsigned char *p, unsigned char key, const void *bytes, uint64_t n)
{
    uint64_t at = 1;
    p[0] = key;
    at += put_varint(p + at, n);
    memcpy(p + at, bytes, n);
    return at + n;
}

/* Around an event of n bytes behind out's first 12. Returns the bytes of the record. */
static uint64_t
put_frame(unsigned char *out, uint64_t n)
{
    put_le(out, n, 8);
    put_checksum(out + 8, out, 8);
    return 12 + n + put_checksum(out + 12 + n, out + 12, n);
}

uint64_t
spw_monitor_record(unsigned char *out, double wall_s, const char *tag, float value, uint64_t samples)
{
    static const char version[] = "brain.Event:2";
    unsigned char *event = out + 12, scalar[TAG_BYTES_MAX + 16], summary[TAG_BYTES_MAX + 24];
    uint64_t n = 0, bits = 0, in_scalar, in_summary;
    memcpy(&bits, &wall_s, 8);
    event[n++] = 1 << 3 | 1; /* wall_time, 64 bits */
    n += put_le(event + n, bits, 8);
    if (tag == NULL && samples == 0) {
        n += put_bytes(event + n, 3 << 3 | 2, version, sizeof version - 1); /* file_version */
        return put_frame(out, n);
    }
    event[n++] = 2 << 3; /* step, varint */
    n += put_varint(event + n, samples);
    if (tag == NULL) {
        n += put_bytes(event + n, 7 << 3 | 2, "\x08\x01", 2); /* session_log: status (1, varint) START */
    } else {
        uint32_t word;
        memcpy(&word, &value, 4);
        in_scalar = put_bytes(scalar, 1 << 3 | 2, tag, strnlen(tag, TAG_BYTES_MAX)); /* tag */
        scalar[in_scalar++] = 2 << 3 | 5;                                            /* simple_value, 32 bits */
        in_scalar += put_le(scalar + in_scalar, word, 4);
        in_summary = put_bytes(summary, 1 << 3 | 2, scalar, in_scalar); /* a value of the summary */
        n += put_bytes(event + n, 5 << 3 | 2, summary, in_summary);     /* summary */
    }
    return put_frame(out, n);
}

/* ---------------------------------------------------------------- files */

void
spw_monitor_folder(char out[SPW_MONITOR_FOLDER_BYTES], const spw_monitor_config *c)
{
    snprintf(out, SPW_MONITOR_FOLDER_BYTES, "%s/%s", c->output_path[0] != '\0' ? c->output_path : ".", c->job_name);
}

static spw_status
open_folder(char folder[SPW_MONITOR_FOLDER_BYTES], const char *key, const spw_monitor_config *c, spw_error *err)
{
    spw_status st;
    spw_monitor_folder(folder, c);
    st = spw_dir_make(folder, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "%s", key);
    return st;
}

static bool
put_record(FILE *f, const char *tag, float value, uint64_t samples)
{
    unsigned char record[SPW_MONITOR_RECORD_BYTES];
    struct timespec now;
    uint64_t n;
    clock_gettime(CLOCK_REALTIME, &now);
    n = spw_monitor_record(record, (double)now.tv_sec + (double)now.tv_nsec * 1e-9, tag, value, samples);
    return fwrite(record, 1, n, f) == n && fflush(f) == 0;
}

/* A file of its own, also where another container's process of the same number began within the second. */
static spw_status
open_events(spw_monitor *m, const spw_monitor_config *c, uint64_t samples, spw_error *err)
{
    char host[65] = "", name[SPW_MONITOR_FOLDER_BYTES + 256];
    long long now = (long long)time(NULL);
    SPW_TRY(open_folder(m->tensorboard, "tensorboard", c, err));
    (void)gethostname(host, sizeof host - 1);
    for (int i = 0; i == 0 || (m->events == NULL && errno == EEXIST); i++) {
        snprintf(name, sizeof name, "%s/events.out.tfevents.%lld.%s.%ld.%d", m->tensorboard, now, host, (long)getpid(),
                 i);
        m->events = fopen(name, "wxe");
    }
    if (m->events == NULL || !put_record(m->events, NULL, 0, 0) ||
        (samples > 0 && !put_record(m->events, NULL, 0, samples + 1)))
        return SPW_RAISE_SYS(err, errno, "tensorboard: %s", name);
    return SPW_OK;
}

spw_status
spw_monitor_open(spw_monitor **out, const spw_config *c, uint64_t samples, spw_error *err)
{
    spw_monitor *m;
    spw_status st = SPW_OK;
    *out = NULL;
    if (!c->csv_monitor.enabled && !c->tensorboard.enabled)
        return SPW_OK;
    m = spw_mem_zalloc(sizeof *m);
    if (m == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "monitors");
    if (c->csv_monitor.enabled)
        st = open_folder(m->csv, "csv_monitor", &c->csv_monitor, err);
    if (st == SPW_OK && c->tensorboard.enabled)
        st = open_events(m, &c->tensorboard, samples, err);
    if (st == SPW_OK)
        *out = m;
    else
        spw_monitor_close(m);
    return st;
}

/* Appends a row; a new file gets its header. */
static bool
put_row(const spw_monitor *m, const char *tag, double value, uint64_t samples)
{
    char name[TAG_BYTES_MAX + 1], path[sizeof m->csv + TAG_BYTES_MAX + 8];
    const char *last = strrchr(tag, '/');
    FILE *f;
    bool done;
    snprintf(name, sizeof name, "%s", tag);
    for (char *c = name; *c != '\0'; c++)
        *c = *c == '/' || *c == ' ' ? '_' : *c;
    snprintf(path, sizeof path, "%s/%s.csv", m->csv, name);
    f = spw_file_append_lines(path);
    if (f == NULL)
        return false;
    done = fseek(f, 0, SEEK_END) == 0 && (ftell(f) > 0 || fprintf(f, "step,%s\n", last != NULL ? last + 1 : tag) > 0);
    done = fprintf(f, "%llu,%.9g\n", (unsigned long long)samples, value) > 0 && done;
    return fclose(f) == 0 && done;
}

void
spw_monitor_write(spw_monitor *m, const char *tag, double value, uint64_t samples)
{
    if (m == NULL)
        return;
    if (m->csv[0] != '\0' && !put_row(m, tag, value, samples)) {
        spw_log(SPW_LOG_WARN, "csv_monitor: %s: %s; no more is written there", m->csv, strerror(errno));
        m->csv[0] = '\0';
    }
    if (m->events != NULL && !put_record(m->events, tag, (float)value, samples)) {
        spw_log(SPW_LOG_WARN, "tensorboard: %s: %s; no more is written there", m->tensorboard, strerror(errno));
        fclose(m->events);
        m->events = NULL;
    }
}

void
spw_monitor_close(spw_monitor *m)
{
    if (m != NULL && m->events != NULL)
        fclose(m->events);
    spw_mem_free(m);
}
