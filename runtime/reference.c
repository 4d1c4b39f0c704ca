/*
 * What the reference finds of answers: a table by window, its file, and the asking, which deals whole micro-batches to the ranks in turn and
 * brings what comes of them to all.
 */
#include "spw_reference.h"
#include "answers.h"
#include "spw_files.h"

enum { VERSION = 1, HEADER_BYTES = 48 };

struct spw_reference {
    uint64_t windows, answers_max, key, there, used; /* windows that are there; of sums */
    uint64_t *first;                                 /* (windows) of its answers in sums */
    uint32_t *counts;                                /* (windows) 0: not there */
    bool *asked;                                     /* (windows) it is there, or will be with the batch under way */
    double *sums;                                    /* (answers_max) as they came */
};

/* ---------------------------------------------------------------- the table */

static uint64_t
file_bytes(uint64_t windows, uint64_t answers)
{
    return HEADER_BYTES + 4 * windows + 8 * answers;
}

uint64_t
spw_reference_memory_bytes(uint64_t windows, uint64_t answers)
{
    return sizeof(spw_reference) + windows * (sizeof(uint64_t) + sizeof(uint32_t) + sizeof(bool)) +
           answers * sizeof(double) + file_bytes(windows, answers);
}

spw_status
spw_reference_create(spw_reference **out, uint64_t windows, uint64_t answers, uint64_t key, spw_error *err)
{
    spw_reference *r = *out = spw_mem_zalloc(sizeof *r);
    if (r != NULL) {
        *r = (spw_reference){.windows = windows, .answers_max = answers, .key = key};
        r->first = spw_mem_calloc(windows, sizeof *r->first);
        r->counts = spw_mem_calloc(windows, sizeof *r->counts);
        r->asked = spw_mem_calloc(windows, sizeof *r->asked);
        r->sums = spw_mem_calloc(answers, sizeof *r->sums);
    }
    if (r != NULL && r->first != NULL && r->counts != NULL && r->asked != NULL && r->sums != NULL)
        return SPW_OK;
    spw_reference_destroy(r);
    *out = NULL;
    return SPW_RAISE(err, SPW_ENOMEM, "what the reference finds of %llu answers", (unsigned long long)answers);
}

void
spw_reference_destroy(spw_reference *r)
{
    if (r == NULL)
        return;
    spw_mem_free(r->first);
    spw_mem_free(r->counts);
    spw_mem_free(r->asked);
    spw_mem_free(r->sums);
    spw_mem_free(r);
}

uint64_t
spw_reference_count(const spw_reference *r)
{
    return r->there;
}

spw_status
spw_reference_put(spw_reference *r, uint64_t window, const double *sums, uint32_t count, spw_error *err)
{
    const bool there = window < r->windows && r->counts[window] > 0;
    if (window >= r->windows || count == 0 || (!there && count > r->answers_max - r->used))
        return SPW_RAISE(
            err, SPW_EINVAL, "%u answers of window %llu: there is room for %llu windows and %llu answers more", count,
            (unsigned long long)window, (unsigned long long)r->windows, (unsigned long long)(r->answers_max - r->used));
    if (there)
        return SPW_OK;
    memcpy(r->sums + r->used, sums, count * sizeof *sums);
    r->first[window] = r->used;
    r->counts[window] = count;
    r->asked[window] = true;
    r->used += count;
    r->there++;
    return SPW_OK;
}

static spw_status
not_asked(uint64_t window, spw_error *err)
{
    return SPW_RAISE(err, SPW_EINVAL,
                     "the reference was not asked about sequence %llu: it was for a training of fewer steps or "
                     "evaluations, and only a new start can ask it (spillway.reference_steps asks about more)",
                     (unsigned long long)window);
}

spw_status
spw_reference_check(const spw_reference *r, const spw_data *data, spw_split split, uint64_t first, uint64_t end,
                    spw_error *err)
{
    for (uint64_t at = first; r->there < r->windows && at < end; at++) {
        const uint64_t window = spw_data_window(data, split, at);
        if (window >= r->windows || r->counts[window] == 0)
            return not_asked(window, err);
    }
    return SPW_OK;
}

spw_status
spw_reference_fill(const spw_reference *r, uint64_t window, const int32_t *tokens, const int32_t *targets, uint64_t T,
                   double *out, spw_error *err)
{
    const uint32_t count = window < r->windows ? r->counts[window] : 0;
    const double *sums = r->sums + (count > 0 ? r->first[window] : 0);
    uint32_t k = 0;
    if (count == 0)
        return not_asked(window, err);
    memset(out, 0, T * sizeof *out);
    for (spw_pair p = {.end = 0};; k += 2) {
        SPW_TRY(spw__pair_next(&p, tokens, targets, T, (uint64_t)p.end, err));
        if (p.end == 0)
            break;
        if (k + 2 <= count) {
            out[p.chosen] = sums[k];
            out[p.rejected] = sums[k + 1];
        }
    }
    if (k == count)
        return SPW_OK;
    return SPW_RAISE(err, SPW_EINVAL, "sequence %llu has %u answers, the reference was asked about %u",
                     (unsigned long long)window, k, count);
}

/* ---------------------------------------------------------------- asking */

/* Micro-batches that are asked about together: where each begins. */
typedef struct batch {
    spw_reference *r;
    const spw_reference_asking *a;
    spw_split split;
    uint64_t *positions; /* (ranks x micro_batches) */
    uint64_t count;
    uint32_t rank, ranks;
} batch;

static spw_status
evaluate(const batch *b, spw_error *err)
{
    const spw_reference_asking *a = b->a;
    const uint64_t tokens = a->sequences * a->T;
    const uint64_t rounds = (b->count + b->ranks - 1) / b->ranks; /* no rank has more to do, in the last batch either */
    double loss;
    for (uint64_t i = 0; i < rounds; i++) {
        const uint64_t k = i * b->ranks + b->rank;
        if (k < b->count) {
            SPW_TRY(spw_data_fill(a->data, b->split, b->positions[k], a->sequences, a->tokens + i * tokens,
                                  a->targets + i * tokens, err));
            continue;
        }
        for (uint64_t j = i * tokens; j < (i + 1) * tokens; j++) {
            a->tokens[j] = 0;
            a->targets[j] = -1;
        }
    }
    spw_engine_set_reference(a->engine, NULL);
    SPW_TRY(spw_engine_eval(a->engine, a->tokens, a->targets, (uint32_t)rounds, &loss, err));
    spw_engine_answers(a->engine, a->targets, (uint32_t)rounds, a->answers);
    return SPW_OK;
}

/* A sequence's answers, of this rank's k-th: in front of a message, and how many they are. */
static spw_status
pick(const spw_reference_asking *a, uint64_t k, double *out, uint32_t *count, spw_error *err)
{
    const uint64_t at = k * a->T;
    *count = 0;
    for (spw_pair p = {.end = 0};;) {
        SPW_TRY(spw__pair_next(&p, a->tokens + at, a->targets + at, a->T, (uint64_t)p.end, err));
        if (p.end == 0)
            return SPW_OK;
        out[(*count)++] = a->answers[at + (uint64_t)p.chosen];
        out[(*count)++] = a->answers[at + (uint64_t)p.rejected];
    }
}

/* Of a rank: for each of its sequences how many answers, and their sums. */
static spw_status
tell(const batch *b, uint32_t from, double *words, spw_error *err)
{
    const spw_reference_asking *a = b->a;
    uint64_t own = 0, used = 0;
    while (own < a->micro_batches && own * b->ranks + from < b->count)
        own++;
    for (uint64_t k = 0; from == b->rank && k < own * a->sequences; k++) {
        uint32_t count;
        SPW_TRY(pick(a, k, words + used + 1, &count, err));
        words[used] = count;
        used += 1 + count;
    }
    if (a->channel != NULL) {
        SPW_TRY(spw_broadcast(a->channel, &used, sizeof used, from, err));
        SPW_TRY(spw_broadcast(a->channel, words, used * sizeof *words, from, err));
    }
    used = 0;
    for (uint64_t k = 0; k < own * a->sequences; k++) {
        const uint64_t position = b->positions[k / a->sequences * b->ranks + from] + k % a->sequences;
        const uint32_t count = (uint32_t)words[used];
        SPW_TRY(spw_reference_put(b->r, spw_data_window(a->data, b->split, position), words + used + 1, count, err));
        used += 1 + count;
    }
    return SPW_OK;
}

static spw_status
ask_batch(batch *b, double *words, spw_error *err)
{
    if (b->count == 0)
        return SPW_OK;
    SPW_TRY(evaluate(b, err));
    for (uint32_t from = 0; from < b->ranks; from++)
        SPW_TRY(tell(b, from, words, err));
    b->count = 0;
    if (b->a->told != NULL && !b->a->told(b->a->ctx, b->r->there))
        return SPW_RAISE(err, SPW_ECANCELED,
                         "stopped before the first step, while the reference was asked: nothing is saved");
    return SPW_OK;
}

/* Whether a window of the micro-batch has not been asked about, or is about to be: it is from here on. */
static bool
is_new(const batch *b, uint64_t position, uint64_t *left)
{
    bool any = false;
    for (uint64_t i = 0; i < b->a->sequences; i++) {
        const uint64_t window = spw_data_window(b->a->data, b->split, position + i);
        *left -= !b->r->asked[window];
        any = any || !b->r->asked[window];
        b->r->asked[window] = true;
    }
    return any;
}

spw_status
spw_reference_ask(spw_reference *r, const spw_reference_asking *a, spw_split split, uint64_t positions, spw_error *err)
{
    batch b = {.r = r, .a = a, .split = split, .ranks = a->channel != NULL ? spw_channel_size(a->channel) : 1};
    uint64_t left = spw_data_sequences(a->data, split); /* each once at most, however often it is drawn */
    /* A message has a word for each sequence, and one for each answer. */
    double *words = spw_mem_calloc(a->micro_batches * a->sequences * (a->T + 1), sizeof *words);
    spw_status st = SPW_OK;
    b.rank = a->channel != NULL ? spw_channel_rank(a->channel) : 0;
    b.positions = spw_mem_calloc((uint64_t)b.ranks * a->micro_batches, sizeof *b.positions);
    if (words == NULL || b.positions == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "what the reference is asked about");
    for (uint64_t at = 0; st == SPW_OK && left > 0 && at + a->sequences <= positions; at += a->sequences) {
        if (!is_new(&b, at, &left))
            continue;
        b.positions[b.count++] = at;
        if (b.count == (uint64_t)b.ranks * a->micro_batches)
            st = ask_batch(&b, words, err);
    }
    if (st == SPW_OK)
        st = ask_batch(&b, words, err);
    spw_mem_free(words);
    spw_mem_free(b.positions);
    return st;
}

/* ---------------------------------------------------------------- the file */

spw_status
spw_reference_save(const spw_reference *r, const char *path, spw_error *err)
{
    const uint64_t bytes = file_bytes(r->windows, r->used);
    unsigned char *file = spw_mem_zalloc(bytes), *at;
    spw_status st;
    if (file == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%llu bytes of %s", (unsigned long long)bytes, path);
    at = file + HEADER_BYTES;
    for (uint64_t w = 0; w < r->windows; w++, at += 4)
        spw_put_le(at, r->counts[w], 4);
    for (uint64_t w = 0; w < r->windows; w++) {
        for (uint32_t k = 0; k < r->counts[w]; k++, at += 8) {
            uint64_t bits;
            memcpy(&bits, &r->sums[r->first[w] + k], sizeof bits);
            spw_put_le(at, bits, 8);
        }
    }
    memcpy(file, "SPWREFER", 8);
    spw_put_le(file + 8, VERSION, 4);
    spw_put_le(file + 16, r->key, 8);
    spw_put_le(file + 24, r->windows, 8);
    spw_put_le(file + 32, r->used, 8);
    spw_put_le(file + 40, spw_checksum_more(0, file + HEADER_BYTES, bytes - HEADER_BYTES), 8);
    st = spw_file_write(path, file, bytes, err);
    spw_mem_free(file);
    return st;
}

static spw_status
uneven(const char *path, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: its windows have not as many answers as it has sums", path);
}

static spw_status
parse(spw_reference *r, const char *path, const unsigned char *file, uint64_t bytes, spw_error *err)
{
    const unsigned char *counts = file + HEADER_BYTES, *sums = counts + 4 * r->windows;
    uint64_t used;
    if (bytes < HEADER_BYTES || memcmp(file, "SPWREFER", 8) != 0 || spw_get_le(file + 8, 4) != VERSION)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: no reference of this version", path);
    used = spw_get_le(file + 32, 8);
    if (spw_get_le(file + 16, 8) != r->key || spw_get_le(file + 24, 8) != r->windows || used > r->answers_max)
        return SPW_RAISE(err, SPW_EINVAL, "%s is of other data: a reference is asked about the pairs of one training",
                         path);
    if (bytes != file_bytes(r->windows, used) ||
        spw_get_le(file + 40, 8) != spw_checksum_more(0, counts, bytes - HEADER_BYTES))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: its contents are not what its checksum says", path);
    for (uint64_t w = 0; w < r->windows; w++) {
        const uint32_t count = (uint32_t)spw_get_le(counts + 4 * w, 4);
        if (count > used - r->used)
            return uneven(path, err);
        r->first[w] = r->used;
        r->counts[w] = count;
        r->asked[w] = count > 0;
        r->there += count > 0;
        for (uint32_t k = 0; k < count; k++, sums += 8) {
            const uint64_t bits = spw_get_le(sums, 8);
            memcpy(&r->sums[r->used++], &bits, sizeof bits);
        }
    }
    return r->used == used ? SPW_OK : uneven(path, err);
}

/* The first rank's file, on all of the channel. */
static spw_status
share(spw_channel *channel, const char *path, spw_status st, unsigned char **file, uint64_t *bytes, spw_error *own,
      spw_error *err)
{
    SPW_TRY(spw_agree(channel, st, own, NULL, err));
    SPW_TRY(spw_broadcast(channel, bytes, sizeof *bytes, 0, err));
    if (*file == NULL && (*file = spw_mem_zalloc(*bytes)) == NULL)
        st = SPW_RAISE(own, SPW_ENOMEM, "%llu bytes of %s", (unsigned long long)*bytes, path);
    SPW_TRY(spw_agree(channel, st, own, NULL, err));
    return spw_broadcast(channel, *file, *bytes, 0, err);
}

spw_status
spw_reference_load(spw_reference *r, const char *path, spw_channel *channel, spw_error *err)
{
    unsigned char *file = NULL;
    uint64_t bytes = 0;
    spw_error own = {0};
    spw_status st = SPW_OK;
    if (channel == NULL || spw_channel_rank(channel) == 0)
        st = spw_file_read(path, INT64_MAX, (void **)&file, &bytes, &own);
    if (channel != NULL)
        st = share(channel, path, st, &file, &bytes, &own, err);
    else if (st != SPW_OK && err != NULL)
        *err = own;
    if (st == SPW_OK)
        st = parse(r, path, file, bytes, err);
    spw_mem_free(file);
    return st;
}
