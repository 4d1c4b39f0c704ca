/* The plan as a table for people: what it puts into each tier, and the budgets. */
#include "plan_internal.h"
#include <stdio.h>
#include <string.h>

void
spw_plan_print(const spw_plan *p, void (*line)(void *ctx, const char *text), void *ctx)
{
    const struct {
        const char *name;
        uint64_t device, host, nvme;
    } rows[] = {{"weights", p->weight_device, p->weight_host, p->weight_nvme},
                {"optimizer records", p->record_device, p->record_host, p->record_nvme},
                {"gradients", p->grads_device + p->grad_device, p->grad_host, p->grad_nvme},
                {"staging slots", 0, p->slots_host, 0},
                {"gathered units", p->cache_device + p->parts_device, 0, 0},
                {"activation checkpoints", p->activations_device, p->activations_host, p->activations_nvme},
                {"activations between", p->tapes_device, 0, 0},
                {"between ranks", 0, p->wire_host, 0},
                {"kept gathered weights", 0, p->kept_host, 0},
                {"working memory", p->arena_device + p->batch_device + p->padding_device, 0, 0},
                {"tables and stacks", 0, p->tables_host, 0},
                {"process", 0, p->process_host, 0},
                {"places to undo updates", 0, p->spare_host, p->spare_nvme},
                {"total", p->device_bytes, p->host_bytes,
                 p->weight_nvme + p->record_nvme + p->grad_nvme + p->activations_nvme + p->spare_nvme}};
    char text[160], a[32], b[32], c[32];
    snprintf(text, sizeof text, "  %-24s %12s %12s %12s", "plan", "device", "host", "nvme");
    line(ctx, text);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if ((p->wire_host == 0 && strcmp(rows[i].name, "between ranks") == 0) ||
            (p->kept_host == 0 && strcmp(rows[i].name, "kept gathered weights") == 0) ||
            (p->spare_nvme + p->spare_host == 0 && strcmp(rows[i].name, "places to undo updates") == 0))
            continue;
        snprintf(text, sizeof text, "  %-24s %12s %12s %12s", rows[i].name,
                 spw_format_bytes(a, sizeof a, rows[i].device), spw_format_bytes(b, sizeof b, rows[i].host),
                 spw_format_bytes(c, sizeof c, rows[i].nvme));
        line(ctx, text);
        if (i == 0 && p->weight_in_place > 0) {
            snprintf(text, sizeof text, "  %-24s %12s %12s %12s", "  frozen, in their files", "", "",
                     spw_format_bytes(c, sizeof c, p->weight_in_place));
            line(ctx, text);
        }
    }
    snprintf(text, sizeof text, "  %-24s %12s %12s", "budget",
             p->device_budget == SPW_AUTO ? "auto" : spw_format_bytes(a, sizeof a, p->device_budget),
             p->host_budget == SPW_AUTO ? "auto" : spw_format_bytes(b, sizeof b, p->host_budget));
    line(ctx, text);
}
