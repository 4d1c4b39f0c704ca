/*
 * Access to state by the name of a parameter. A call is checked on every rank, all ranks agree that all may go on and mean
 * the same, and only then anything moves: each rank's chunks go past spw_state_get or spw_state_set on the store's workers,
 * and what has to be known elsewhere is broadcast by whoever has it.
 *
 * A change leaves no copy behind that shows what was before: the store drops its own, and gathered units are forgotten by
 * all ranks at one point of the program (gather.c needs that), for local changes at the next step.
 */
#include "engine_internal.h"
#include "spw_access.h"

enum { BLOCK_ELEMS = 1 << 18 };

_Static_assert((int)SPW_ACCESS_MASTER == (int)SPW_PART_MASTER && (int)SPW_ACCESS_EXP_AVG == (int)SPW_PART_EXP_AVG &&
                   (int)SPW_ACCESS_EXP_AVG_SQ == (int)SPW_PART_EXP_AVG_SQ,
               "parts of a format come first, in its order");

/* An access that was found and may go on: elements [first, end) of a parameter. */
typedef struct target {
    uint32_t param_id;
    spw_access_part part;
    uint64_t first, end;
    uint32_t next; /* next_part's own: the piece behind it */
} target;

/* What of the target is in one piece of its parameter: each call makes *part the next, which is zeroed before the first; false: that was the last. */
static bool
next_part(const spw_engine *e, const target *t, target *part)
{
    const spw_place *at = &e->layout.places[t->param_id];
    uint32_t piece = part->end > 0 ? part->next : (uint32_t)(t->first / at->piece_elems);
    uint64_t first = piece * at->piece_elems, end = first + at->piece_elems;
    if (first >= t->end)
        return false;
    *part = *t;
    part->first = first > t->first ? first : t->first;
    part->end = end < t->end ? end : t->end;
    part->next = piece + 1;
    return true;
}

/* Where it lies, and how many elements of its parameter are in front of that. */
static spw_place
place_of(const spw_engine *e, const target *part, uint64_t *before)
{
    const spw_place *at = &e->layout.places[part->param_id];
    uint32_t piece = (uint32_t)(part->first / at->piece_elems);
    *before = piece * at->piece_elems;
    return spw_layout_piece(at, piece);
}

/* ---------------------------------------------------------------- checking */

static spw_status
unknown_param(const spw_engine *e, const char *name, spw_error *err)
{
    const char *near = NULL;
    unsigned least = 4;
    for (uint32_t id = 0; id < e->model->param_count; id++) {
        unsigned d = spw__name_distance(name, e->model->params[id].name);
        if (d < least) {
            least = d;
            near = e->model->params[id].name;
        }
    }
    if (near != NULL)
        return SPW_RAISE(err, SPW_EINVAL, "the model has no parameter %.100s; did you mean %s?", name, near);
    return SPW_RAISE(err, SPW_EINVAL, "the model has no parameter %.100s", name);
}

static const spw_optimizer *
rule_of(const spw_engine *e, uint32_t param_id)
{
    return spw__engine_optimizer(e, e->layout.places[param_id].unit_idx);
}

static const char *
part_name(const spw_engine *e, uint32_t param_id, spw_access_part part)
{
    const spw_optimizer *o = rule_of(e, param_id);
    switch (part) {
    case SPW_ACCESS_MASTER: return "master";
    case SPW_ACCESS_EXP_AVG: return o->moment_count > 0 ? o->moment_names[0] : "first moment";
    case SPW_ACCESS_EXP_AVG_SQ: return o->moment_count > 1 ? o->moment_names[1] : "second moment";
    case SPW_ACCESS_WEIGHT: return "weight";
    case SPW_ACCESS_GRAD: return "gradient";
    default: return "unknown part";
    }
}

static spw_status
check_gradient(const spw_engine *e, const target *t, spw_error *err)
{
    const spw_param *p = &e->model->params[t->param_id];
    if (e->plan.grad_nvme > 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "the gradient of %s waits for its update on nvme and cannot be read by name; with "
                         "spillway.gradients host it can",
                         p->name);
    if (!e->grads_there)
        return SPW_RAISE(
            err, SPW_ESTALE,
            "the gradient of %s is gone: its update consumed it, or no step has made one; it is there inside "
            "spw_engine_on_gradients(), and after a skipped step until the next one",
            p->name);
    if (e->first_use[e->layout.places[t->param_id].unit_idx] < 0)
        return SPW_RAISE(err, SPW_ESTALE, "%s has no gradient: the chain leaves its block out", p->name);
    return SPW_OK;
}

/* Does a chunk that holds some of it stay in a file? */
static bool
in_place(const spw_engine *e, const target *t)
{
    bool any = false;
    for (target part = {0}; next_part(e, t, &part);) {
        uint64_t before, first, end;
        const spw_place at = place_of(e, &part, &before);
        const spw_store_unit *u = &e->layout.units[at.unit_idx];
        for (uint32_t i = u->chunk_first; i < u->chunk_first + u->chunk_count; i++) {
            const spw_store_chunk *c = &e->layout.chunks[i];
            any = any ||
                  (c->piece_count > 0 && c->weight_tier == SPW_TIER_NVME && spw__layout_overlap(&at, c, &first, &end));
        }
    }
    return any;
}

static spw_status
check_part(const spw_engine *e, const target *t, bool set, spw_error *err)
{
    const spw_param *p = &e->model->params[t->param_id];
    const char *name = part_name(e, t->param_id, t->part);
    const spw_optimizer *o = rule_of(e, t->param_id);
    if ((unsigned)t->part >= SPW_ACCESS_PART_COUNT)
        return SPW_RAISE(err, SPW_EINVAL, "part %d of %s: there is none of that number", (int)t->part, p->name);
    if (set && (t->part == SPW_ACCESS_WEIGHT || t->part == SPW_ACCESS_GRAD))
        return SPW_RAISE(err, SPW_EINVAL, "the %s of %s cannot be set; the master can, and the weight follows it", name,
                         p->name);
    if (set && in_place(e, t))
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s is frozen and read from the files it comes from, so it cannot be set; with "
                         "spillway.frozen_in_place false it can",
                         p->name);
    if (set && spw__layout_published(&e->layout, e->layout.places[t->param_id].unit_idx) != SPW_QUANT_NONE)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s is frozen and kept in the codes it was published in, so it cannot be set; with "
                         "spillway.frozen_codes none it can",
                         p->name);
    if (t->part == SPW_ACCESS_MASTER || t->part == SPW_ACCESS_WEIGHT)
        return SPW_OK;
    if (t->part != SPW_ACCESS_GRAD && (uint32_t)(t->part - SPW_ACCESS_EXP_AVG) >= o->moment_count)
        return SPW_RAISE(err, SPW_EINVAL, "%s keeps %u moments: %s has no %s", o->name, o->moment_count, p->name, name);
    if (!e->layout.units[e->layout.places[t->param_id].unit_idx].trainable)
        return SPW_RAISE(err, SPW_EINVAL, "%s has no %s: %s", p->name, name,
                         e->inference ? "this engine is for inference" : "it is frozen");
    return t->part == SPW_ACCESS_GRAD ? check_gradient(e, t, err) : SPW_OK;
}

static spw_status
resolve(const spw_engine *e, const spw_access *a, bool set, target *t, spw_error *err)
{
    uint64_t elems;
    uint32_t id = a->param != NULL ? spw_model_find_param(e->model, a->param) : UINT32_MAX;
    if (id == UINT32_MAX)
        return unknown_param(e, a->param != NULL ? a->param : "(none)", err);
    elems = e->layout.places[id].elems;
    if (a->first >= elems || a->count > elems - a->first)
        return SPW_RAISE(err, SPW_EINVAL, "elements %llu to %llu of %s, which has %llu", (unsigned long long)a->first,
                         (unsigned long long)(a->first + a->count), e->model->params[id].name,
                         (unsigned long long)elems);
    *t = (target){id, a->part, a->first, a->count > 0 ? a->first + a->count : elems, 0};
    SPW_TRY(spw__engine_unbroken(e, err));
    SPW_TRY(check_part(e, t, set, err));
    if (t->part == SPW_ACCESS_GRAD)
        return SPW_OK;
    if (e->in_step)
        return SPW_RAISE(err, SPW_EINVAL, "the %s of %s in the middle of a step, where only gradients can be read",
                         part_name(e, t->param_id, t->part), e->model->params[id].name);
    return spw_store_sweep_some(e->store, SPW_SWEEP_VISIT, 0, 0, NULL, NULL, err); /* may one begin? */
}

spw_status
spw_access_find(spw_access *out, const spw_engine *e, const char *param, const char *part, spw_error *err)
{
    uint32_t id = spw_model_find_param(e->model, param);
    const spw_optimizer *o;
    if (id == UINT32_MAX)
        return unknown_param(e, param, err);
    o = rule_of(e, id);
    for (int p = 0; p < SPW_ACCESS_PART_COUNT; p++) {
        bool moment = p == SPW_ACCESS_EXP_AVG || p == SPW_ACCESS_EXP_AVG_SQ;
        const char *name = p == SPW_ACCESS_GRAD ? "grad" : part_name(e, id, (spw_access_part)p);
        if (strcmp(name, part) != 0 || (moment && (uint32_t)(p - SPW_ACCESS_EXP_AVG) >= o->moment_count))
            continue;
        *out = (spw_access){e->model->params[id].name, (spw_access_part)p, 0, e->layout.places[id].elems};
        return SPW_OK;
    }
    return SPW_RAISE(err, SPW_EINVAL, "there is no part %.40s; %s has master, weight, grad%s%s%s%s", part, o->name,
                     o->moment_count > 0 ? ", " : "", o->moment_count > 0 ? o->moment_names[0] : "",
                     o->moment_count > 1 ? ", " : "", o->moment_count > 1 ? o->moment_names[1] : "");
}

/* ---------------------------------------------------------------- what this rank holds */

/* What of a part a rank holds, as elements of the parameter. */
static spw_stretch
stretch_of(const spw_engine *e, const target *part, uint32_t rank)
{
    uint64_t before, begin, first, end;
    const spw_place at = place_of(e, part, &before);
    const spw_store_unit *u = &e->layout.units[at.unit_idx];
    begin = rank % e->layout.parts * u->elems; /* of the unit */
    first = at.first + (part->first - before);
    first = begin > first ? begin : first;
    end = at.first + (part->end - before);
    end = begin + u->elems < end ? begin + u->elems : end;
    return first < end ? (spw_stretch){first - at.first + before, end - first} : (spw_stretch){part->first, 0};
}

/* Of a target that may have several parts, which only one rank holds in a row. */
static spw_status
held_of(const spw_engine *e, const target *t, spw_stretch *held, spw_error *err)
{
    target part = {0}, more;
    (void)next_part(e, t, &part);
    *held = stretch_of(e, &part, e->rank);
    more = part;
    if (!next_part(e, t, &more))
        return SPW_OK;
    *held = (spw_stretch){t->first, t->end - t->first};
    if (e->layout.parts == 1)
        return SPW_OK;
    return SPW_RAISE(
        err, SPW_EUNSUPPORTED,
        "elements %llu to %llu of %s are in several pieces (spillway.tile_vocab), of which each rank holds "
        "a part; ask for those of one: multiples of %llu begin one",
        (unsigned long long)t->first, (unsigned long long)t->end, e->model->params[t->param_id].name,
        (unsigned long long)e->layout.places[t->param_id].piece_elems);
}

typedef struct job {
    const spw_engine *e;
    spw_access_part part;
    spw_place place; /* of the stretch: elements of the unit */
    float *out;      /* NULL: set */
    const float *in;
} job;

static spw_status
visit_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    const job *j = ctx;
    const spw_store_chunk *c = &j->e->layout.chunks[chunk_idx];
    spw_state_format f = spw__engine_format(j->e);
    uint64_t first, end, at, n;
    (void)grad;
    (void)err;
    if (!spw__layout_overlap(&j->place, c, &first, &end))
        return SPW_OK;
    at = first - j->place.first;
    n = end - first;
    if (j->out == NULL)
        spw_state_set(f, spw__engine_optimizer(j->e, c->unit_idx), weights, record, c->elems, (spw_state_part)j->part,
                      first - c->first, n, j->in + at);
    else if (j->part == SPW_ACCESS_WEIGHT)
        spw_convert(j->out + at, SPW_F32, (const char *)weights + (first - c->first) * spw_state_weight_bytes(f),
                    spw_state_weight_dtype(f), n);
    else
        spw_state_get(f, spw__engine_optimizer(j->e, c->unit_idx), weights, record, c->elems, (spw_state_part)j->part,
                      first - c->first, n, j->out + at);
    return SPW_OK;
}

/* Gradients are of the loss times its scale. */
static void
read_gradient(const spw_engine *e, const spw_place *place, float *out)
{
    spw_dtype type = e->config.run.grad_dtype;
    uint64_t at = place->first - e->layout.units[place->unit_idx].first;
    const char *grad = (const char *)spw_store_grad(e->store, place->unit_idx) + at * spw_dtype_bytes(type);
    if (spw_store_grad_on_device(e->store, place->unit_idx)) {
        spw_gpu_copy_d2h(e->d2h, out, SPW_F32, grad, type, place->elems, NULL);
        spw_gpu_queue_sync(e->d2h);
    } else {
        spw_convert(out, SPW_F32, grad, type, place->elems);
    }
    for (uint64_t i = 0; i < place->elems && e->grad_factor != 1; i++)
        out[i] = (float)(out[i] * e->grad_factor);
}

/* What this rank holds of a part. One of out and in is set. */
static spw_status
move_held(spw_engine *e, const target *t, spw_stretch held, float *out, const float *in, spw_error *err)
{
    uint64_t before, first, end;
    const spw_place at = place_of(e, t, &before);
    const spw_store_unit *u = &e->layout.units[at.unit_idx];
    job j = {e, t->part, at, out, in};
    uint32_t begin = u->chunk_first, stop;
    j.place.first = at.first + (held.first - before);
    j.place.elems = held.count;
    if (held.count == 0)
        return SPW_OK;
    if (t->part == SPW_ACCESS_GRAD) {
        read_gradient(e, &j.place, out);
        return SPW_OK;
    }
    while (!spw__layout_overlap(&j.place, &e->layout.chunks[begin], &first, &end))
        begin++;
    stop = begin;
    while (stop < u->chunk_first + u->chunk_count &&
           spw__layout_overlap(&j.place, &e->layout.chunks[stop], &first, &end))
        stop++;
    e->counting = false;
    return spw_store_sweep_some(e->store, out != NULL ? SPW_SWEEP_VISIT : SPW_SWEEP_EDIT, begin, stop - begin,
                                visit_chunk, &j, err);
}

spw_status
spw_access_get_local(spw_engine *e, const spw_access *a, float *out, spw_stretch *held, spw_error *err)
{
    target t;
    SPW_TRY(resolve(e, a, false, &t, err));
    SPW_TRY(held_of(e, &t, held, err));
    for (target part = {0}; out != NULL && next_part(e, &t, &part);)
        SPW_TRY(move_held(e, &part, stretch_of(e, &part, e->rank), out + (part.first - t.first), NULL, err));
    return SPW_OK;
}

spw_status
spw_access_set_local(spw_engine *e, const spw_access *a, const float *values, spw_stretch *held, spw_error *err)
{
    target t;
    SPW_TRY(resolve(e, a, true, &t, err));
    SPW_TRY(held_of(e, &t, held, err));
    if (held->count == 0)
        return SPW_OK;
    if (values == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "no values for %s", a->param);
    e->part_changed = true;
    for (target part = {0}; next_part(e, &t, &part);)
        SPW_TRY(move_held(e, &part, stretch_of(e, &part, e->rank), NULL, values + (part.first - t.first), err));
    return SPW_OK;
}

/* ---------------------------------------------------------------- all ranks together */

/* What a rank means with a collective call. */
static uint64_t
meaning(const target *t, bool set, int64_t from)
{
    uint64_t said[6] = {t->param_id, t->part, t->first, t->end, set, (uint64_t)from};
    return spw_checksum(said, sizeof said);
}

/* All of it to every rank: each reads what it holds, and those of one group tell all. */
static spw_status
fetch(spw_engine *e, const target *t, float *out, spw_error *err)
{
    spw_status st = SPW_OK;
    for (target part = {0}; st == SPW_OK && next_part(e, t, &part);) {
        spw_stretch held = stretch_of(e, &part, e->rank);
        st = move_held(e, &part, held, out + (held.first - t->first), NULL, err);
        for (uint32_t r = 0; st == SPW_OK && e->layout.parts > 1 && r < e->layout.parts; r++) {
            spw_stretch s = stretch_of(e, &part, r);
            if (s.count > 0)
                st = spw__ranks_broadcast(e->ranks, out + (s.first - t->first), s.count * sizeof *out, r, err);
        }
    }
    return st == SPW_OK ? st : spw__ranks_fail(e->ranks, st, err);
}

spw_status
spw_access_get_full(spw_engine *e, const spw_access *a, float *out, spw_error *err)
{
    target t = {0};
    spw_error own = {0};
    (void)resolve(e, a, false, &t, &own);
    SPW_TRY(spw__engine_consent(e, &own, meaning(&t, false, 0), err));
    return fetch(e, &t, out, err);
}

/* Before parts are put: what was gathered shows what was before. */
static spw_status
begin_putting(spw_engine *e, spw_error *err)
{
    spw_status st = spw__engine_forget(e, err);
    return st == SPW_OK ? st : spw__ranks_fail(e->ranks, st, err);
}

/* mine (held.count): the values of what this rank holds of the part. They are the same as everybody's where it is the same. */
static spw_status
put(spw_engine *e, const target *part, spw_stretch held, const float *mine, spw_error *err)
{
    spw_status st = move_held(e, part, held, NULL, mine, err);
    return st == SPW_OK ? st : spw__ranks_fail(e->ranks, st, err);
}

/* In blocks, of which each rank keeps what it holds. */
static spw_status
share(spw_engine *e, const target *t, spw_stretch held, const float *values, uint32_t from, float *mine, float *block,
      spw_error *err)
{
    for (uint64_t at = t->first, n; at < t->end; at += n) {
        uint64_t first, end;
        n = t->end - at < BLOCK_ELEMS ? t->end - at : BLOCK_ELEMS;
        if (e->rank == from)
            memcpy(block, values + (at - t->first), n * sizeof *block);
        SPW_TRY(spw__ranks_broadcast(e->ranks, block, n * sizeof *block, from, err));
        first = held.first > at ? held.first : at;
        end = held.first + held.count < at + n ? held.first + held.count : at + n;
        if (first < end)
            memcpy(mine + (first - held.first), block + (first - at), (end - first) * sizeof *mine);
    }
    return SPW_OK;
}

spw_status
spw_access_set_full(spw_engine *e, const spw_access *a, const float *values, uint32_t from, spw_error *err)
{
    target t = {0};
    spw_error own = {0};
    float *mine = NULL, *block = NULL;
    spw_status st;
    if (from >= e->world)
        (void)SPW_RAISE(&own, SPW_EINVAL, "values of rank %u, there are %u", from, e->world);
    else if (from == e->rank && values == NULL)
        (void)SPW_RAISE(&own, SPW_EINVAL, "no values for %s", a->param != NULL ? a->param : "(none)");
    else
        (void)resolve(e, a, true, &t, &own);
    if (own.status == SPW_OK && e->ranks != NULL) {
        uint64_t all = t.end - t.first, most = 0;
        for (target part = {0}; next_part(e, &t, &part);) {
            spw_stretch held = stretch_of(e, &part, e->rank);
            most = held.count > most ? held.count : most;
        }
        mine = spw_mem_zalloc((most + 1) * sizeof *mine);
        block = spw_mem_zalloc((all < BLOCK_ELEMS ? all : BLOCK_ELEMS) * sizeof *block);
        if (mine == NULL || block == NULL)
            (void)SPW_RAISE(&own, SPW_ENOMEM, "values of %s (%llu elements)", a->param, (unsigned long long)most);
    }
    st = spw__engine_consent(e, &own, meaning(&t, true, from), err);
    if (st == SPW_OK)
        st = begin_putting(e, err);
    for (target part = {0}; st == SPW_OK && next_part(e, &t, &part);) {
        spw_stretch held = stretch_of(e, &part, e->rank);
        const float *from_here = e->rank == from ? values + (part.first - t.first) : NULL;
        if (e->ranks != NULL)
            st = share(e, &part, held, from_here, from, mine, block, err);
        if (st == SPW_OK)
            st = put(e, &part, held, e->ranks != NULL ? mine : from_here, err);
    }
    spw_mem_free(mine);
    spw_mem_free(block);
    return st;
}

/* ---------------------------------------------------------------- whole parameters for a while */

struct spw_gathered {
    spw_engine *e;
    uint64_t updates, fills; /* the engine's, at begin */
    uint32_t count;
    target *targets; /* (count) */
    float **values;  /* (count) */
};

static void
free_gathered(spw_gathered *g)
{
    for (uint32_t i = 0; g->values != NULL && i < g->count; i++)
        spw_mem_free(g->values[i]);
    spw_mem_free(g->values);
    spw_mem_free(g->targets);
    spw_mem_free(g);
}

/* Without a word to the others. */
static spw_status
prepare_gathered(spw_gathered *g, const char *const *params, spw_error *err)
{
    g->targets = spw_mem_calloc(g->count, sizeof *g->targets);
    g->values = spw_mem_calloc(g->count, sizeof *g->values);
    if (g->targets == NULL || g->values == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%u gathered parameters", g->count);
    for (uint32_t i = 0; i < g->count; i++) {
        SPW_TRY(resolve(g->e, &(spw_access){.param = params[i]}, true, &g->targets[i], err));
        for (uint32_t k = 0; k < i; k++) {
            if (g->targets[k].param_id == g->targets[i].param_id)
                return SPW_RAISE(err, SPW_EINVAL, "%s is named twice", params[i]);
        }
    }
    for (uint32_t i = 0; i < g->count; i++) {
        g->values[i] = spw_mem_zalloc(g->targets[i].end * sizeof(float));
        if (g->values[i] == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "a copy of %s (%llu elements)", params[i],
                             (unsigned long long)g->targets[i].end);
    }
    return SPW_OK;
}

static uint64_t
meaning_of_all(const spw_gathered *g, bool set, int64_t from)
{
    uint64_t said = g->count;
    for (uint32_t i = 0; i < g->count && g->targets != NULL; i++)
        said = said * 31 + meaning(&g->targets[i], set, from);
    return said;
}

spw_status
spw_gathered_begin(spw_gathered **out, spw_engine *e, const char *const *params, uint32_t count, spw_error *err)
{
    spw_gathered *g = spw_mem_zalloc(sizeof *g);
    spw_error own = {0};
    spw_status st;
    *out = NULL;
    if (g == NULL) {
        (void)SPW_RAISE(&own, SPW_ENOMEM, "gathered parameters");
        return spw__engine_consent(e, &own, 0, err);
    }
    *g = (spw_gathered){.e = e, .updates = e->updates, .fills = e->fills, .count = count};
    (void)prepare_gathered(g, params, &own);
    st = spw__engine_consent(e, &own, meaning_of_all(g, false, 0), err);
    for (uint32_t i = 0; st == SPW_OK && i < count; i++)
        st = fetch(e, &g->targets[i], g->values[i], err);
    if (st != SPW_OK)
        free_gathered(g);
    else
        *out = g;
    return st;
}

float *
spw_gathered_values(const spw_gathered *g, uint32_t i, uint64_t *elems_out)
{
    SPW_ASSERT(i < g->count);
    if (elems_out != NULL)
        *elems_out = g->targets[i].end;
    return g->values[i];
}

static spw_status
check_write_back(const spw_gathered *g, int32_t from, spw_error *err)
{
    const spw_engine *e = g->e;
    if (from < 0 || (uint32_t)from >= e->world)
        return SPW_RAISE(err, SPW_EINVAL, "write-back from rank %d, there are %u", from, e->world);
    if (g->updates != e->updates)
        return SPW_RAISE(err, SPW_ESTALE, "the parameters were gathered after update %llu, the engine is at %llu",
                         (unsigned long long)g->updates, (unsigned long long)e->updates);
    if (g->fills != e->fills)
        return SPW_RAISE(err, SPW_ESTALE, "the parameters were loaded or drawn anew since they were gathered");
    if (g->count == 0)
        return SPW_OK;
    return resolve(e, &(spw_access){.param = e->model->params[g->targets[0].param_id].name}, true, &(target){0}, err);
}

static spw_status
write_back(spw_gathered *g, uint32_t from, spw_error *err)
{
    spw_engine *e = g->e;
    spw_error own = {0};
    spw_status st = SPW_OK;
    (void)check_write_back(g, (int32_t)from, &own);
    SPW_TRY(spw__engine_consent(e, &own, meaning_of_all(g, true, from), err));
    SPW_TRY(begin_putting(e, err));
    for (uint32_t i = 0; st == SPW_OK && i < g->count; i++) {
        const target *t = &g->targets[i];
        if (e->ranks != NULL)
            st = spw__ranks_broadcast(e->ranks, g->values[i], t->end * sizeof(float), from, err);
        for (target part = {0}; st == SPW_OK && next_part(e, t, &part);) {
            spw_stretch held = stretch_of(e, &part, e->rank);
            st = put(e, &part, held, g->values[i] + held.first, err);
        }
    }
    return st;
}

spw_status
spw_gathered_end(spw_gathered *g, int32_t from, spw_error *err)
{
    spw_status st = SPW_OK;
    if (g == NULL)
        return SPW_OK;
    if (from != SPW_GATHERED_DROP)
        st = write_back(g, (uint32_t)from, err);
    free_gathered(g);
    return st;
}

/* ---------------------------------------------------------------- what is gathered for computing */

spw_status
spw_engine_release_gathered(spw_engine *e, spw_error *err)
{
    spw_error own = {0};
    if (e->in_step)
        (void)SPW_RAISE(&own, SPW_EINVAL, "gathered weights cannot be released in the middle of a step");
    SPW_TRY(spw__engine_consent(e, &own, 0, err));
    SPW_TRY(spw__engine_forget(e, err));
    SPW_TRY(spw_store_drain(e->store, err)); /* updates hand on what they make */
    spw_store_forget(e->store);
    e->told.goes_on = false;
    e->part_changed = false;
    e->counting = false;
    return spw_store_check(e->store, err);
}
