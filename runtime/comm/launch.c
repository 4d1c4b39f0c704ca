/*
 * How this process was started: reads the variables that MPI launchers, torchrun and Slurm set, and says which backend
 * follows from them. Nothing is opened here.
 *
 * Variables are inherited, so one launcher inside another leaves both its own and the outer one's. torchrun, and whoever
 * sets RANK, WORLD_SIZE and MASTER_ADDR, names this process completely and is the inner one: srun starts torchrun, never
 * the other way round. A launcher that says that it started one process, as srun does of a shell, started no world.
 */
#include "comm_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static const char *
variable(const char *name)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

/* A number of the environment: false when unset. */
static spw_status
number(const char *name, uint32_t least, uint32_t most, bool *set, uint32_t *out, spw_error *err)
{
    const char *text = variable(name);
    char *end;
    unsigned long long value;
    *set = text != NULL;
    if (text == NULL)
        return SPW_OK;
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || text[0] < '0' || text[0] > '9' || *end != '\0' || value < least || value > most)
        return SPW_RAISE(err, SPW_ECONFIG, "variable %s is \"%s\": a number from %u to %u is needed", name, text, least,
                         most);
    *out = (uint32_t)value;
    return SPW_OK;
}

/* The first variable by which an MPI launcher gives itself away; NULL: none did. */
static const char *
mpi_sign(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK",
                                        "MV2_COMM_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (variable(names[i]) != NULL)
            return names[i];
    }
    return NULL;
}

/*
 * How many processes MPI launchers say that they started, or where they do not, Slurm; 0: nobody says. One inside another leaves
 * both its own number and the outer one's.
 */
static void
mpi_sizes(uint32_t *least, uint32_t *most)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    *least = *most = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        uint32_t size = variable(names[i]) != NULL ? (uint32_t)strtoul(variable(names[i]), NULL, 10) : 0;
        if (size == 0 || (strncmp(names[i], "SLURM", 5) == 0 && *most > 0))
            continue;
        *least = *most == 0 || size < *least ? size : *least;
        *most = size > *most ? size : *most;
    }
}

/* Whether this process was started alone, by all that is said: of the step, or else of the job. */
static bool
mpi_alone(uint32_t most)
{
    const char *job = variable("SLURM_NTASKS");
    return most == 1 || (most == 0 && job != NULL && strcmp(job, "1") == 0);
}

spw_status
spw__launch_join_timeout(double *out, spw_error *err)
{
    const char *text = variable("SPW_JOIN_TIMEOUT");
    char *end;
    double value;
    if (text == NULL)
        return SPW_OK;
    value = strtod(text, &end);
    if (*end != '\0' || !(value >= 0.1 && value <= 1e8))
        return SPW_RAISE(err, SPW_ECONFIG, "variable SPW_JOIN_TIMEOUT is \"%s\": seconds from 0.1 to 1e8 are needed",
                         text);
    *out = value;
    return SPW_OK;
}

static spw_status
read_tcp(spw__launch *out, const char *rank_name, const char *world_name, spw_error *err)
{
    const char *host = variable("MASTER_ADDR");
    /* torchrun's own agent listens at MASTER_PORT then, and everybody knows */
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    bool taken = agent != NULL && strcmp(agent, "True") == 0, has_rank, has_world, has_port;
    uint32_t port = 0;
    out->backend = SPW_COMM_TCP;
    SPW_TRY(number(world_name, 1, 65535, &has_world, &out->world, err));
    if (!has_world)
        return SPW_RAISE(err, SPW_ECONFIG, "variable %s is not set: how many ranks there are", world_name);
    SPW_TRY(number(rank_name, 0, out->world - 1, &has_rank, &out->rank, err));
    if (!has_rank)
        return SPW_RAISE(err, SPW_ECONFIG, "variable %s is not set: which of %u ranks this is", rank_name, out->world);
    SPW_TRY(number("MASTER_PORT", 1, 65534, &has_port, &port, err));
    if (out->world > 1 && (host == NULL || !has_port))
        return SPW_RAISE(err, SPW_ECONFIG, "variable %s is not set: rank 0 listens at MASTER_ADDR:MASTER_PORT",
                         host == NULL ? "MASTER_ADDR" : "MASTER_PORT");
    snprintf(out->host, sizeof out->host, "%s", host != NULL ? host : "localhost");
    snprintf(out->port, sizeof out->port, "%u", port + taken);
    snprintf(out->reason, sizeof out->reason, "%s is %u of %s %u", rank_name, out->rank, world_name, out->world);
    return SPW_OK;
}

spw_status
spw__launch_read(spw__launch *out, spw_comm_backend wanted, spw_error *err)
{
    const char *sign = mpi_sign();
    uint32_t least, most;
    const char *world = variable("WORLD_SIZE");
    bool torch = variable("RANK") != NULL && world != NULL,
         half = !torch && (variable("RANK") != NULL || world != NULL);
    bool slurm = variable("SLURM_PROCID") != NULL && variable("SLURM_NTASKS") != NULL;
    memset(out, 0, sizeof *out);
    out->world = 1;
    out->backend = wanted;
    switch (wanted) {
    case SPW_COMM_SELF: snprintf(out->reason, sizeof out->reason, "asked for"); return SPW_OK;
    case SPW_COMM_MPI: snprintf(out->reason, sizeof out->reason, "asked for"); return SPW_OK;
    case SPW_COMM_TCP:
        return !torch && slurm ? read_tcp(out, "SLURM_PROCID", "SLURM_NTASKS", err)
                               : read_tcp(out, "RANK", "WORLD_SIZE", err);
    case SPW_COMM_AUTO: break;
    default: return SPW_RAISE(err, SPW_EINVAL, "backend %d of ranks is unknown", (int)wanted);
    }
    if (torch && variable("MASTER_ADDR") != NULL)
        return read_tcp(out, "RANK", "WORLD_SIZE", err);
    mpi_sizes(&least, &most);
    if (sign != NULL && !mpi_alone(most)) {
        out->backend = SPW_COMM_MPI;
        out->started = least;
        snprintf(out->reason, sizeof out->reason, "%s is set", sign);
        return SPW_OK;
    }
    if (torch)
        return read_tcp(out, "RANK", "WORLD_SIZE", err);
    if (sign != NULL) {
        out->backend = SPW_COMM_SELF;
        snprintf(out->reason, sizeof out->reason, "%s is set, by a launcher of one process", sign);
        return SPW_OK;
    }
    if (slurm && variable("MASTER_ADDR") != NULL)
        return read_tcp(out, "SLURM_PROCID", "SLURM_NTASKS", err);
    if (variable("SLURM_STEP_NUM_TASKS") != NULL && strcmp(variable("SLURM_STEP_NUM_TASKS"), "1") != 0)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "srun started %s tasks, but MASTER_ADDR and MASTER_PORT are not set (or use srun --mpi=pmix)",
                         variable("SLURM_STEP_NUM_TASKS"));
    if (half && !(world != NULL && strcmp(world, "1") == 0)) /* each would train alone, and save to the same folder */
        return SPW_RAISE(err, SPW_ECONFIG, "variable %s is \"%s\", but %s is not set: ranks need both, or neither",
                         world != NULL ? "WORLD_SIZE" : "RANK", world != NULL ? world : variable("RANK"),
                         world != NULL ? "RANK" : "WORLD_SIZE");
    out->backend = SPW_COMM_SELF;
    snprintf(out->reason, sizeof out->reason, "no MPI launcher's variables, no RANK and WORLD_SIZE");
    return SPW_OK;
}
