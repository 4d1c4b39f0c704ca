/*
 * The generator: sequences in slots over an engine that keeps their keys and values. A forward pass takes the next piece of
 * every slot that has tokens to run: pieces of prompts one by one, single tokens of all slots together, so that weights are
 * used for many sequences while they are on the device, and no sequence is padded to another's length.
 */
#include "runtime_internal.h"
#include "spw_generate.h"

enum { NO_LOGITS = -1 };

typedef struct sequence {
    int32_t *tokens;           /* (positions) */
    uint64_t count, done, now; /* tokens fed, run, and in the pass under way */
    uint64_t checksum;         /* of the tokens, one by one */
    int64_t logits;            /* row of the last pass; NO_LOGITS */
} sequence;

struct spw_generator {
    /* Fixed after create. */
    spw_engine *engine;
    const spw_model *model;
    uint32_t slot_count;
    uint64_t positions, piece;
    void *memory;
    /* The caller's thread's. */
    sequence *sequences; /* (slot_count) */
    float *logits;       /* (slot_count, V) of the last pass */
    spw_candidate *room; /* (V) */
    /* The pass under way. */
    engine_part *parts;       /* (slot_count) */
    int32_t *tokens, *places; /* (slot_count, piece) */
    int32_t *slots, *starts;  /* (slot_count) */
    uint64_t *logit_rows;     /* (slot_count) */
    bool broken;
};

/* ---------------------------------------------------------------- lifetime */

static void *
take(char *base, uint64_t *used, uint64_t count, uint64_t bytes)
{
    void *p = base != NULL ? base + *used : NULL;
    *used += spw_round_up(count * bytes, 64);
    return p;
}

/* Points the tables into base; NULL: only counts. Returns their bytes. */
static uint64_t
lay_out(spw_generator *g, char *base)
{
    uint64_t used = 0, n = g->slot_count, V = g->model->config.vocab;
    int32_t *tokens = take(base, &used, n * g->positions, sizeof *tokens);
    g->sequences = take(base, &used, n, sizeof *g->sequences);
    g->logits = take(base, &used, n * V, sizeof *g->logits);
    g->room = take(base, &used, V, sizeof *g->room);
    g->parts = take(base, &used, n, sizeof *g->parts);
    g->tokens = take(base, &used, n * g->piece, sizeof *g->tokens);
    g->places = take(base, &used, n * g->piece, sizeof *g->places);
    g->slots = take(base, &used, n, sizeof *g->slots);
    g->starts = take(base, &used, n, sizeof *g->starts);
    g->logit_rows = take(base, &used, n, sizeof *g->logit_rows);
    for (uint64_t i = 0; i < n && base != NULL; i++)
        g->sequences[i] = (sequence){.tokens = tokens + i * g->positions, .logits = NO_LOGITS};
    return used;
}

spw_status
spw_generator_create(spw_generator **out, const spw_generator_options *o, spw_error *err)
{
    const spw_model_config *m = &o->model->config;
    spw_generator *g;
    uint64_t bytes;
    spw_status st;
    *out = NULL;
    if (o->slots == 0 || o->slots > 65536 || o->positions == 0)
        return SPW_RAISE(err, SPW_EINVAL, "%u sequences of %llu positions: 1 to 65536 of at least 1", o->slots,
                         (unsigned long long)o->positions);
    if (o->positions > m->positions)
        return SPW_RAISE(err, SPW_EINVAL, "%llu positions are more than the model's %llu",
                         (unsigned long long)o->positions, (unsigned long long)m->positions);
    g = spw_mem_zalloc(sizeof *g);
    if (g == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "generator");
    g->model = o->model;
    g->slot_count = o->slots;
    g->positions = o->positions;
    g->piece = o->piece > 0 && o->piece < o->positions ? o->piece : o->positions;
    bytes = lay_out(g, NULL);
    st = spw_engine_create(&g->engine,
                           &(spw_engine_options){.config = o->config,
                                                 .model = o->model,
                                                 .inference = true,
                                                 .sequences = g->slot_count,
                                                 .positions = g->piece,
                                                 .cache_slots = g->slot_count,
                                                 .cache_positions = g->positions,
                                                 .caller_bytes = bytes,
                                                 .weights_from = o->weights_from,
                                                 .stop = o->stop,
                                                 .plan_out = o->plan_out},
                           err);
    if (st == SPW_OK && (g->memory = spw_mem_zalloc(bytes)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "generator (%llu bytes)", (unsigned long long)bytes);
    if (st != SPW_OK) {
        spw_generator_destroy(g);
        return st;
    }
    (void)lay_out(g, g->memory);
    *out = g;
    return SPW_OK;
}

void
spw_generator_destroy(spw_generator *g)
{
    if (g == NULL)
        return;
    spw_engine_destroy(g->engine);
    spw_mem_free(g->memory);
    spw_mem_free(g);
}

spw_engine *
spw_generator_engine(spw_generator *g)
{
    return g->engine;
}

/* ---------------------------------------------------------------- sequences */

spw_status
spw_generator_feed(spw_generator *g, uint32_t slot, const int32_t *tokens, uint64_t count, spw_error *err)
{
    sequence *s;
    if (slot >= g->slot_count)
        return SPW_RAISE(err, SPW_EINVAL, "there is no slot %u of %u", slot, g->slot_count);
    s = &g->sequences[slot];
    if (count > g->positions - s->count)
        return SPW_RAISE(err, SPW_EINVAL, "%llu tokens after %llu are more than the %llu positions of a sequence",
                         (unsigned long long)count, (unsigned long long)s->count, (unsigned long long)g->positions);
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (uint64_t)tokens[i] >= g->model->config.vocab)
            return SPW_RAISE(err, SPW_EINVAL, "token %d is outside the vocabulary of %llu", tokens[i],
                             (unsigned long long)g->model->config.vocab);
    }
    for (uint64_t i = 0; i < count; i++) {
        s->tokens[s->count++] = tokens[i];
        s->checksum = spw_checksum_more(s->checksum, &tokens[i], sizeof tokens[i]);
    }
    if (count > 0)
        s->logits = NO_LOGITS;
    return SPW_OK;
}

void
spw_generator_clear(spw_generator *g, uint32_t slot)
{
    if (slot < g->slot_count)
        g->sequences[slot] = (sequence){.tokens = g->sequences[slot].tokens, .logits = NO_LOGITS};
}

uint64_t
spw_generator_length(const spw_generator *g, uint32_t slot)
{
    return slot < g->slot_count ? g->sequences[slot].count : 0;
}

const float *
spw_generator_logits(const spw_generator *g, uint32_t slot)
{
    if (slot >= g->slot_count || g->sequences[slot].logits == NO_LOGITS)
        return NULL;
    return g->logits + (uint64_t)g->sequences[slot].logits * g->model->config.vocab;
}

/* ---------------------------------------------------------------- a forward pass */

/* Adds a slot's next tokens to the pass; k counts its slots, rows its tokens. */
static void
add_piece(spw_generator *g, engine_extension *x, uint32_t slot, uint64_t k, uint64_t *rows)
{
    sequence *s = &g->sequences[slot];
    uint64_t n = s->now;
    for (uint64_t i = 0; i < n; i++) {
        g->tokens[*rows + i] = s->tokens[s->done + i];
        g->places[*rows + i] = (int32_t)(s->done + i);
    }
    g->slots[k] = (int32_t)slot;
    g->starts[k] = (int32_t)s->done;
    *rows += n;
    s->done += n;
    if (s->done == s->count) {
        s->logits = x->logit_count;
        g->logit_rows[x->logit_count++] = *rows - 1;
    }
}

spw_status
spw_generator_forward(spw_generator *g, spw_error *err)
{
    engine_extension x = {.parts = g->parts,
                          .tokens = g->tokens,
                          .places = g->places,
                          .slots = g->slots,
                          .starts = g->starts,
                          .logit_rows = g->logit_rows,
                          .logits = g->logits};
    uint64_t rows = 0, k = 0, singles_row, singles;
    spw_status st;
    if (g->broken)
        return SPW_RAISE(err, SPW_EPOISONED, "an earlier forward pass failed");
    for (uint32_t i = 0; i < g->slot_count; i++) {
        sequence *s = &g->sequences[i];
        s->now = s->count - s->done < g->piece ? s->count - s->done : g->piece;
        s->logits = NO_LOGITS;
        if (s->now > 1) {
            g->parts[x.part_count++] = (engine_part){1, s->now, rows, k};
            add_piece(g, &x, i, k++, &rows);
        }
    }
    singles_row = rows;
    singles = k;
    for (uint32_t i = 0; i < g->slot_count;
         i++) { /* also the last token of a prompt: its bits depend on the prompt alone */
        if (g->sequences[i].now == 1)
            add_piece(g, &x, i, k++, &rows);
    }
    if (k > singles)
        g->parts[x.part_count++] = (engine_part){k - singles, 1, singles_row, singles};
    if (x.part_count == 0)
        return SPW_OK;
    st = spw__engine_extend(g->engine, &x, err);
    g->broken = st != SPW_OK;
    return st;
}

spw_status
spw_generator_draw(spw_generator *g, uint32_t slot, const spw_sampling *how, int32_t *token, spw_error *err)
{
    const float *logits = spw_generator_logits(g, slot);
    uint32_t r[4];
    double uniform;
    if (logits == NULL || g->broken)
        return SPW_RAISE(err, SPW_EINVAL, "slot %u has no logits: it needs tokens and a forward pass", slot);
    spw_philox(how->seed, g->sequences[slot].checksum, g->sequences[slot].count, r);
    uniform = (double)(((uint64_t)r[0] << 21) ^ (r[1] >> 11)) * 0x1p-53;
    *token = spw_sample(logits, g->model->config.vocab, how, uniform, g->room);
    if (*token < 0)
        return SPW_RAISE(err, SPW_ENONFINITE, "the logits after %llu tokens have a NaN, or no number at all",
                         (unsigned long long)g->sequences[slot].count);
    return SPW_OK;
}
