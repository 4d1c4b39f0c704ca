/*
 * Sources of files and their windows in numbers. Which window is at a position is order.c's, what a window holds windows.c's, and what a
 * file's tokens look like files.c's.
 */
#include "data_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FDS_KEPT_MAX = 128 }; /* files beyond are opened for each window */

/* ---------------------------------------------------------------- opening */

static spw_status
add_file(spw_data *d, const char *path, const spw_data_options *o, spw_error *err)
{
    data_file *f;
    if (d->file_count == d->capacity) {
        uint32_t capacity = d->capacity * 2 + 16;
        data_file *grown = spw_mem_calloc(capacity, sizeof *grown);
        if (grown == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "list of %u data files", capacity);
        if (d->file_count > 0)
            memcpy(grown, d->files, d->file_count * sizeof *grown);
        spw_mem_free(d->files);
        d->files = grown;
        d->capacity = capacity;
    }
    f = &d->files[d->file_count];
    d->file_count++; /* from here close finds it, half found too */
    SPW_TRY(spw__data_file_find(f, path, o, &d->warned_of_lines, err));
    if (f->path == NULL) /* a folder */
        d->file_count--;
    return SPW_OK;
}

static spw_status
open_file(spw_data *d, uint32_t file_idx, const spw_data_options *o, spw_error *err)
{
    data_file *f = &d->files[file_idx];
    SPW_TRY(spw__data_file_open(f, o, err));
    if (f->fd >= 0 && d->fds_kept == FDS_KEPT_MAX) {
        close(f->fd);
        f->fd = -1;
    } else if (f->fd >= 0) {
        d->fds_kept++;
    }
    if (f->made) {
        bool noted = d->made_bytes >= NOTED_BYTES;
        d->made_bytes += f->bytes;
        if (!noted && d->made_bytes >= NOTED_BYTES && f->bytes < NOTED_BYTES) /* a large one says so itself */
            spw_log(SPW_LOG_NOTE, "data: making tokens of many files: %u of %u so far", file_idx + 1, d->file_count);
    }
    d->bytes += f->bytes;
    d->tokens += f->tokens;
    return SPW_OK;
}

static int
by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names that a glob found, by byte values (its own order is the locale's); the list is the caller's. NULL: no memory. */
static char **
sort_names(const glob_t *found)
{
    char **names = spw_mem_calloc(found->gl_pathc + 1, sizeof *names);
    if (names == NULL)
        return NULL;
    memcpy(names, found->gl_pathv, found->gl_pathc * sizeof *names);
    qsort(names, found->gl_pathc, sizeof *names, by_name);
    return names;
}

/* A glob finds both files of a Megatron dataset: the index is skipped where its tokens are found too. bin has room for path. */
static bool
is_index_of_another(char *const *names, size_t count, const char *path, char *bin)
{
    size_t n = strlen(path);
    if (n <= 4 || strcmp(path + n - 4, ".idx") != 0)
        return false;
    memcpy(bin, path, n - 4);
    memcpy(bin + n - 4, ".bin", 5);
    return bsearch(&bin, names, count, sizeof *names, by_name) != NULL;
}

static spw_status
add_found(spw_data *d, const glob_t *found, const spw_data_options *o, spw_error *err)
{
    size_t longest = 0;
    char **names = sort_names(found), *bin;
    spw_status st = SPW_OK;
    for (size_t i = 0; i < found->gl_pathc; i++)
        longest = strlen(found->gl_pathv[i]) > longest ? strlen(found->gl_pathv[i]) : longest;
    bin = spw_mem_zalloc(longest + 1);
    if (names == NULL || bin == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "names of %zu data files", found->gl_pathc);
    for (size_t i = 0; i < found->gl_pathc && st == SPW_OK; i++) {
        if (o->format == SPW_DATA_TEXT || !is_index_of_another(names, found->gl_pathc, found->gl_pathv[i], bin))
            st = add_file(d, found->gl_pathv[i], o, err);
    }
    spw_mem_free(names);
    spw_mem_free(bin);
    return st;
}

/* A path that is there as it is written is no glob, whatever brackets it has. */
static spw_status
add_pattern(spw_data *d, const char *pattern, const spw_data_options *o, spw_error *err)
{
    glob_t found;
    struct stat info;
    spw_status st = SPW_OK;
    int rc;
    if (stat(pattern, &info) == 0)
        return add_file(d, pattern, o, err);
    if (strstr(pattern, "**") != NULL) /* which glob() takes for one folder, and leaves the files of other depths out */
        return SPW_RAISE(
            err, SPW_EINVAL,
            "data.path: %s: ** does not stand for folders of any depth here: a list names each depth, as in "
            "[\"corpus/*.txt\", \"corpus/*/*.txt\"]",
            pattern);
    rc = glob(pattern, GLOB_ERR | GLOB_TILDE, NULL, &found);
    if (rc == GLOB_NOMATCH) { /* PREFIX of a Megatron dataset? */
        char *index = spw_mem_zalloc(strlen(pattern) + 5);
        if (index == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "name of %s", pattern);
        snprintf(index, strlen(pattern) + 5, "%s.idx", pattern);
        if ((o->format == SPW_DATA_AUTO || o->format == SPW_DATA_MEGATRON) && stat(index, &info) == 0)
            st = add_file(d, index, o, err);
        else
            st = SPW_RAISE(err, SPW_ENOENT, "data.path: nothing matches %s", pattern);
        spw_mem_free(index);
        return st;
    }
    if (rc != 0)
        return SPW_RAISE_SYS(err, errno != 0 ? errno : EIO, "data.path: looking for %s", pattern);
    st = add_found(d, &found, o, err);
    globfree(&found);
    return st;
}

/*
 * The rule of runs before this one: each file's share by itself, so that of many small files nothing was held out, or of one
 * alone. Kept to tell those who go on from their checkpoints; held (file_count) out. Returns the sum.
 */
static uint64_t
hold_out_before(const data_file *files, uint32_t count, uint64_t T, double split, uint64_t *held)
{
    uint64_t all = 0, sum = 0;
    uint32_t last = 0; /* the last file with a window */
    for (uint32_t i = 0; i < count; i++) {
        uint64_t windows = files[i].tokens > T ? (files[i].tokens - 1) / T : 0;
        held[i] = (uint64_t)((double)windows * split + 0.5);
        if (held[i] >= windows)
            held[i] = windows > 0 ? windows - 1 : 0;
        last = windows > 0 ? i : last;
        all += windows;
        sum += held[i];
    }
    if (sum == 0 && split > 0 && all > 1)
        sum = held[last] = 1;
    return sum;
}

/*
 * Windows at the files' ends are held out: as many of the first k files as their windows' share is, rounded, so that what one
 * file is too short for is carried to the next. A split above 0 holds out one window at least where there are two, and one
 * is trained on.
 */
static spw_status
number_windows(spw_data *d, data_source *s, double split, spw_error *err)
{
    uint64_t T = d->seq_length, all = 0, so_far = 0, most, *before;
    data_file *files = d->files + s->file_first;
    for (uint32_t i = 0; i < s->file_count; i++)
        all += files[i].tokens > T ? (files[i].tokens - 1) / T : 0;
    most = all > 0 ? all - 1 : 0;
    for (uint32_t i = 0; i < s->file_count; i++) {
        data_file *f = &files[i];
        uint64_t windows = f->tokens > T ? (f->tokens - 1) / T : 0, due, held;
        so_far += windows;
        due = (uint64_t)((double)so_far * split + 0.5);
        if (so_far == all && due == 0 && split > 0 && windows > 0)
            due = 1;
        due = due < most ? due : most;
        held = due > s->windows[SPW_SPLIT_VALIDATION] ? due - s->windows[SPW_SPLIT_VALIDATION] : 0;
        held = held < windows ? held : windows;
        f->window_count[SPW_SPLIT_VALIDATION] = held;
        f->window_count[SPW_SPLIT_TRAIN] = windows - held;
        s->windows[SPW_SPLIT_VALIDATION] += held;
        s->windows[SPW_SPLIT_TRAIN] += windows - held;
    }
    before = spw_mem_calloc(s->file_count, sizeof *before);
    if (before == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "windows of %u data files", s->file_count);
    d->held_before += hold_out_before(files, s->file_count, T, split, before);
    for (uint32_t i = 0; i < s->file_count; i++)
        d->split_moved = d->split_moved || before[i] != files[i].window_count[SPW_SPLIT_VALIDATION];
    spw_mem_free(before);
    for (int k = 0; k < 2; k++) {
        uint64_t first = 0;
        for (uint32_t i = 0; i < s->file_count; i++) {
            files[i].window_first[k] = first;
            first += files[i].window_count[k];
        }
        d->windows[k] += s->windows[k];
    }
    return SPW_OK;
}

/* Finds the files of a source, and what they are. */
static spw_status
add_source(spw_data *d, const char *const *patterns, uint32_t count, double weight, const spw_data_options *o,
           spw_error *err)
{
    data_source *s = &d->sources[d->source_count];
    *s = (data_source){.name = count == 1 ? patterns[0] : "all paths", .file_first = d->file_count, .weight = weight};
    for (uint32_t i = 0; i < count; i++)
        SPW_TRY(add_pattern(d, patterns[i], o, err));
    s->file_count = d->file_count - s->file_first;
    if (s->file_count == 0)
        return SPW_RAISE(err, SPW_EINVAL, "%s: %s: only folders; %s/* takes the files in one",
                         d->mixed ? "data.sources" : "data.path", s->name, s->name);
    d->source_count++;
    return SPW_OK;
}

/* Before anything is made of the data: a setting for JSON lines would be passed over without a word. */
static spw_status
check_lines(const spw_data *d, const spw_data_options *o, spw_error *err)
{
    for (uint32_t i = 0; i < d->file_count && o->pairs; i++) {
        if (d->files[i].format != SPW_DATA_JSONL)
            return SPW_RAISE(
                err, SPW_ECONFIG,
                "data: %s is read as %s, and pairs of answers are JSON lines (which have a name in .jsonl, or "
                "data.format jsonl)",
                d->files[i].path, spw_data_format_name(d->files[i].format));
    }
    if (o->lines_for == NULL)
        return SPW_OK;
    for (uint32_t i = 0; i < d->file_count; i++) {
        if (d->files[i].format == SPW_DATA_JSONL)
            return SPW_OK;
    }
    return SPW_RAISE(err, SPW_ECONFIG,
                     "%s is for JSON lines, and no file of the data holds such: %s is read as %s (JSON lines have a "
                     "name in .jsonl, or data.format jsonl)",
                     o->lines_for, d->files[0].path, spw_data_format_name(d->files[0].format));
}

/* Pairs that were left out of a source's files. */
static uint64_t
count_left_out(const spw_data *d, const data_source *s)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < s->file_count; i++)
        count += d->files[s->file_first + i].cut;
    return count;
}

static spw_status
open_source(spw_data *d, data_source *s, const spw_data_options *o, spw_error *err)
{
    uint64_t tokens = d->tokens, bytes = d->bytes;
    for (uint32_t i = 0; i < s->file_count; i++)
        SPW_TRY(open_file(d, s->file_first + i, o, err));
    tokens = d->tokens - tokens;
    bytes = d->bytes - bytes;
    if (bytes == 0)
        return SPW_RAISE(err, SPW_EINVAL, "%s: %s: all %u files are empty", d->mixed ? "data.sources" : "data.path",
                         s->name, s->file_count);
    SPW_TRY(number_windows(d, s, o->validation_split, err));
    if (s->windows[SPW_SPLIT_TRAIN] == 0 && o->pairs)
        return SPW_RAISE(
            err, SPW_EINVAL,
            "%s: %s: no pair of answers is left in %u files, and %llu were left out: both answers of a pair, each "
            "behind its prompt, have to be within data.seq_length (%llu tokens), and not the same or without a target",
            d->mixed ? "data.sources" : "data.path", s->name, s->file_count, (unsigned long long)count_left_out(d, s),
            (unsigned long long)d->seq_length);
    if (s->windows[SPW_SPLIT_TRAIN] == 0)
        return SPW_RAISE(err, SPW_EINVAL,
                         "%s: %s: no file is long enough for one sequence: %llu tokens (%llu bytes) in %u files, a "
                         "sequence of %llu tokens needs %llu in one file",
                         d->mixed ? "data.sources" : "data.path", s->name, (unsigned long long)tokens,
                         (unsigned long long)bytes, s->file_count, (unsigned long long)d->seq_length,
                         (unsigned long long)d->seq_length + 1);
    return SPW_OK;
}

/* "text", or "2 llm.c u16, 1 jsonl". */
static void
say_formats(spw_data *d)
{
    static const char *const widths[] = {" u8", " i8", " i16", " u16", " i32", " u32", " i64", "", ""};
    enum { ELEMENTS = sizeof widths / sizeof widths[0] };
    uint32_t like[SPW_DATA_FORMAT_COUNT * ELEMENTS] = {0}, told = 0;
    size_t n = 0;
    for (uint32_t i = 0; i < d->file_count; i++)
        like[d->files[i].format * ELEMENTS + d->files[i].element]++;
    for (uint32_t i = 0; i < d->file_count && n < sizeof d->formats; i++) {
        const data_file *f = &d->files[i];
        uint32_t *count = &like[f->format * ELEMENTS + f->element];
        if (*count == 0)
            continue; /* told with the first that is like it */
        if (*count < d->file_count)
            n += (size_t)snprintf(d->formats + n, sizeof d->formats - n, "%s%u ", told > 0 ? ", " : "", *count);
        if (n < sizeof d->formats)
            n += (size_t)snprintf(d->formats + n, sizeof d->formats - n, "%s%s", spw_data_format_name(f->format),
                                  f->format == SPW_DATA_TEXT ? "" : widths[f->element]);
        *count = 0;
        told++;
    }
}

static spw_status
check_options(const spw_data_options *o, spw_error *err)
{
    if (o->seq_length == 0 || !(o->validation_split >= 0 && o->validation_split < 1))
        return SPW_RAISE(err, SPW_EINVAL, "data.seq_length must be at least 1 and data.validation_split in [0, 1)");
    if (o->pairs && o->documents != SPW_DOCUMENTS_WHOLE)
        return SPW_RAISE(err, SPW_EINVAL, "data: pairs of answers are never cut: data.documents must be whole");
    if (o->source_count > SPW_DATA_SOURCES_MAX || (o->source_count > 0 && o->pattern_count > 0))
        return SPW_RAISE(err, SPW_EINVAL, "data: %u sources, at most %d, and no patterns beside them", o->source_count,
                         SPW_DATA_SOURCES_MAX);
    for (uint32_t i = 0; i < o->source_count; i++) {
        if (!(o->sources[i].weight > 0 && o->sources[i].weight <= 1e9))
            return SPW_RAISE(err, SPW_EINVAL, "data.sources: weight of %s is not above 0 and up to 1e9",
                             o->sources[i].path);
    }
    if (o->end_of_text_set && (o->end_of_text < 0 || (o->vocab > 0 && (uint64_t)o->end_of_text >= o->vocab)))
        return SPW_RAISE(err, SPW_EINVAL, "data: end of text is token %d, the vocabulary has %llu", o->end_of_text,
                         (unsigned long long)o->vocab);
    for (uint32_t i = 0; i < o->begin_of_text.count; i++) {
        int32_t id = o->begin_of_text.ids[i];
        if (id < 0 || (o->vocab > 0 && (uint64_t)id >= o->vocab))
            return SPW_RAISE(err, SPW_EINVAL, "data: texts begin with token %d, the vocabulary has %llu", id,
                             (unsigned long long)o->vocab);
    }
    return SPW_OK;
}

/* What decides about tokens of JSON lines besides the encoder, and its key: ", chat KEY". */
static void
say_lines(spw_data *d, const spw_data_options *o)
{
    size_t n = strlen(d->encoder);
    uint64_t key = o->chat != NULL ? spw__data_chat_key(o) : 0;
    if (o->pairs)
        key = spw__data_pair_key(o, key);
    if (o->chat != NULL)
        snprintf(d->chat, sizeof d->chat, "%s", spw_chat_says(o->chat));
    if (o->chat != NULL || o->pairs)
        snprintf(d->encoder + n, sizeof d->encoder - n, ", %s%s%s %016llx", o->chat != NULL ? "chat" : "",
                 o->chat != NULL && o->pairs ? " and " : "", o->pairs ? "pairs" : "", (unsigned long long)key);
}

/* What made tokens of text, if any of the files is text. */
static void
say_encoder(spw_data *d, const spw_data_options *o)
{
    bool text = false, lines = false;
    for (uint32_t i = 0; i < d->file_count; i++) {
        lines = lines || d->files[i].format == SPW_DATA_JSONL;
        text = text || (d->files[i].format == SPW_DATA_JSONL && !d->files[i].of_tokens) ||
               d->files[i].format == SPW_DATA_TEXT;
    }
    if (text && (o->encode != NULL || (lines && o->chat != NULL)))
        snprintf(d->encoder, sizeof d->encoder, "tokenizer %016llx", (unsigned long long)spw_data_encode_key(o));
    else if (!text && o->documents != SPW_DOCUMENTS_PACKED && o->end_of_text_set)
        snprintf(d->encoder, sizeof d->encoder, "none, documents end with token %d", o->end_of_text);
    else
        snprintf(d->encoder, sizeof d->encoder, text ? "bytes" : "none");
    if (lines)
        say_lines(d, o);
}

static spw_status
open_sources(spw_data *d, const spw_data_options *o, spw_error *err)
{
    d->mixed = o->source_count > 0;
    for (uint32_t i = 0; i < o->source_count; i++)
        SPW_TRY(add_source(d, &o->sources[i].path, 1, o->sources[i].weight, o, err));
    if (!d->mixed)
        SPW_TRY(add_source(d, o->patterns, o->pattern_count, 1, o, err));
    SPW_TRY(check_lines(d, o, err));
    for (uint32_t s = 0; s < d->source_count; s++)
        SPW_TRY(open_source(d, &d->sources[s], o, err));
    for (int k = 0; k < 2; k++) {
        double weights[SPW_DATA_SOURCES_MAX];
        for (uint32_t s = 0; s < d->source_count; s++)
            weights[s] = d->sources[s].windows[k] > 0 ? d->sources[s].weight : 0;
        if (d->windows[k] > 0)
            spw__data_mix_init(&d->mix[k], weights, d->source_count);
    }
    say_formats(d);
    say_encoder(d, o);
    return SPW_OK;
}

spw_status
spw_data_open(spw_data **out, const spw_data_options *o, spw_error *err)
{
    spw_data *d;
    spw_status st;
    *out = NULL;
    SPW_TRY(check_options(o, err));
    d = spw_mem_zalloc(sizeof *d);
    if (d == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "data");
    d->seq_length = o->seq_length;
    d->seed = o->seed;
    d->vocab = o->vocab;
    d->documents = o->documents;
    st = open_sources(d, o, err);
    if (st != SPW_OK)
        spw_data_close(d);
    else
        *out = d;
    return st;
}

void
spw_data_close(spw_data *d)
{
    if (d == NULL)
        return;
    for (uint32_t i = 0; i < d->file_count; i++)
        spw__data_file_close(&d->files[i]);
    spw_mem_free(d->files);
    spw_mem_free(d);
}

uint64_t
spw_data_bytes(const spw_data *d)
{
    return d->bytes;
}

uint64_t
spw_data_tokens(const spw_data *d)
{
    return d->tokens;
}

uint32_t
spw_data_file_count(const spw_data *d)
{
    return d->file_count;
}

uint64_t
spw_data_sequences(const spw_data *d, spw_split split)
{
    return d->windows[split];
}

bool
spw_data_split_moved(const spw_data *d, uint64_t *held_before)
{
    *held_before = d->held_before;
    return d->split_moved;
}

uint64_t
spw_data_untargeted(const spw_data *d, uint64_t *cut)
{
    uint64_t windows = 0;
    *cut = 0;
    for (uint32_t i = 0; i < d->file_count; i++) {
        windows += d->files[i].untargeted;
        *cut += d->files[i].cut;
    }
    return windows;
}

uint64_t
spw_data_pairs(const spw_data *d)
{
    uint64_t pairs = 0;
    for (uint32_t i = 0; i < d->file_count; i++)
        pairs += d->files[i].pairs;
    return pairs;
}

double
spw_data_targeted(const spw_data *d)
{
    uint64_t targets = 0;
    for (uint32_t i = 0; i < d->file_count; i++)
        targets += d->files[i].targets > 0 ? d->files[i].targets : d->files[i].tokens;
    return d->tokens > 0 ? (double)targets / (double)d->tokens : 1;
}

const char *
spw_data_formats(const spw_data *d)
{
    return d->formats;
}

const char *
spw_data_encoder(const spw_data *d)
{
    return d->encoder;
}

const char *
spw_data_chat(const spw_data *d)
{
    return d->chat;
}

uint64_t
spw_data_memory_bytes(const spw_data *d)
{
    uint64_t bytes = sizeof *d + d->capacity * sizeof *d->files;
    for (uint32_t i = 0; i < d->file_count; i++) {
        const data_file *f = &d->files[i];
        bytes += strlen(f->path) + 1 + strlen(f->store) + 1 + (f->index != NULL ? strlen(f->index) + 1 : 0);
    }
    return bytes;
}

bool
spw_documents_parse(const char *name, spw_documents *out)
{
    static const char *const names[] = {"packed", "mask", "separate", "whole"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (spw_documents)i;
            return true;
        }
    }
    return false;
}
