/*
 * spillway eval --pairs: what training on preferences says of pairs of answers, by the rule that a checkpoint was trained by. A reference is
 * asked first, and gone when the model comes.
 */
#include "eval.h"
#include <math.h>
#include <stdio.h>

/* A folder's: DPO with its usual beta. */
spw_status
cli_eval_pairs_rule(eval_job *j, spw_error *err)
{
    spw_config *c = &j->weights.config;
    if (!spw_config_preference(c, &j->rule)) {
        snprintf(c->run.preference.loss, sizeof c->run.preference.loss, "%s", spw_preference_name(SPW_PREFERENCE_DPO));
        c->run.preference.beta = 0.1;
        (void)spw_config_preference(c, &j->rule);
    }
    return j->reference == NULL || spw_preference_refers(j->rule.kind)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "--reference: %s was trained by %s, which has none", j->weights.path,
                           spw_preference_name(j->rule.kind));
}

static bool
goes_on(void *ctx, uint64_t asked)
{
    (void)ctx;
    (void)asked;
    return !cli_stop;
}

spw_status
cli_eval_pairs_ask(eval_job *j, spw_error *err)
{
    spw_config *c = &j->beside.config;
    if (j->reference == NULL)
        return SPW_OK;
    SPW_TRY(spw_weights_find(&j->beside, j->reference, err));
    if (j->seq_length > c->model.positions)
        return SPW_RAISE(err, SPW_ECONFIG, "--reference %s has %llu positions, and sequences are of %llu tokens",
                         j->beside.path, (unsigned long long)c->model.positions, (unsigned long long)j->seq_length);
    cli_place_apply(&j->place, c);
    c->data.seq_length = j->seq_length;
    c->run.preference = j->weights.config.run.preference;
    snprintf(c->data.documents, sizeof c->data.documents, "%s", j->weights.config.data.documents);
    SPW_TRY(spw_reference_create(&j->found, spw_data_sequences(j->text, SPW_SPLIT_TRAIN), 2 * spw_data_pairs(j->text),
                                 0, err));
    SPW_TRY(cli_eval_open(j, &j->beside, err));
    SPW_TRY(spw_reference_ask(j->found,
                              &(spw_reference_asking){.engine = j->e,
                                                      .data = j->text,
                                                      .sequences = j->batch_size,
                                                      .T = j->seq_length,
                                                      .micro_batches = 1,
                                                      .tokens = j->tokens,
                                                      .targets = j->targets,
                                                      .answers = j->answers,
                                                      .told = goes_on},
                              SPW_SPLIT_TRAIN, spw_round_up(cli_eval_sequences(j), j->batch_size), err));
    cli_eval_close(j);
    return SPW_OK;
}

spw_status
cli_eval_pairs_batch(eval_job *j, uint64_t first, uint64_t n, spw_error *err)
{
    const uint64_t T = j->seq_length;
    const spw_pair_means *of;
    double loss;
    for (uint64_t k = 0; k < n && j->found != NULL; k++)
        SPW_TRY(spw_reference_fill(j->found, spw_data_window(j->text, SPW_SPLIT_TRAIN, first + k), j->tokens + k * T,
                                   j->targets + k * T, T, j->answers + k * T, err));
    spw_engine_set_reference(j->e, j->answers);
    SPW_TRY(spw_engine_eval(j->e, j->tokens, j->targets, 1, &loss, err));
    of = spw_engine_preferred(j->e);
    if (of->pairs == 0)
        return SPW_OK;
    j->sums.loss += of->loss * (double)of->pairs;
    j->sums.chosen += of->chosen * (double)of->pairs;
    j->sums.rejected += of->rejected * (double)of->pairs;
    j->sums.right += of->right * (double)of->pairs;
    j->sums.pairs += of->pairs;
    return SPW_OK;
}

spw_status
cli_eval_pairs_show(const eval_job *j, spw_error *err)
{
    const double n = (double)j->sums.pairs, loss = j->sums.loss / n, right = j->sums.right / n;
    const double chosen = j->sums.chosen / n, rejected = j->sums.rejected / n;
    json_t *o;
    if (!j->json) {
        printf("right %.4f  margin %.4f  loss %.6f  %llu pairs in %llu sequences of %llu  %.0f tokens/s\n", right,
               chosen - rejected, loss, (unsigned long long)j->sums.pairs, (unsigned long long)j->sequences_done,
               (unsigned long long)j->seq_length, (double)j->tokens_done / j->seconds);
        return cli_eval_check(j, loss, err);
    }
    o = json_pack("{s:o, s:s, s:o, s:f, s:f, s:f, s:I, s:I, s:I, s:f}", "path", cli_json_text(j->weights.path), "rule",
                  spw_preference_name(j->rule.kind), "loss", isfinite(loss) ? json_real(loss) : json_null(), "right",
                  right, "chosen", chosen, "rejected", rejected, "pairs", (json_int_t)j->sums.pairs, "sequences",
                  (json_int_t)j->sequences_done, "seq_length", (json_int_t)j->seq_length, "seconds", j->seconds);
    if (j->reference != NULL)
        json_object_set_new(o, "reference", cli_json_text(j->beside.path));
    SPW_TRY(cli_show_json("eval", CLI_DIGITS_ALL, o, err));
    return cli_eval_check(j, loss, err);
}
