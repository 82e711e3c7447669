//! Which tokens enter the model next: places, the token budget, and blocks, which the newest request gives back when
//! they run out. Knows nothing of the model or of how tokens are chosen.
//!
//! Why it always goes on: a request is only taken when it fits the cache alone, and the oldest one in the cache can have
//! any block that a newer one holds.

use std::collections::VecDeque;

use super::blocks::Blocks;
use super::params::Stats;
use super::request::{Branch, Request};
use super::step::BLOCK_TOKENS;

/// Some tokens of a sequence that enter the model.
#[derive(Debug)]
pub struct Entry {
    /// The request, by its place in the order of requests.
    pub arrival: u64,
    /// The sequence of the request.
    pub branch: usize,
    /// How many tokens, from the first that is not in the cache on.
    pub count: usize,
    /// Whether they enter as prompt, rather than one after the others.
    pub is_prompt: bool,
}

/// A step.
#[derive(Debug, Default)]
pub struct Plan {
    /// What enters; the sequences of a request follow one another.
    pub entries: Vec<Entry>,
    /// Blocks to copy before, from and to, in this order.
    pub copies: Vec<(u32, u32)>,
}

/// What came of a sequence that wanted to enter.
enum Entrance {
    Entered,
    /// What it would compute is on its way through another sequence.
    IsComing,
    /// Blocks are short.
    IsFull,
}

/// The requests that are there, and the cache's blocks.
#[derive(Debug)]
pub struct Scheduler {
    max_rows: usize,
    step_tokens: usize,
    /// Who holds which block.
    pub blocks: Blocks,
    /// Not in the cache, by arrival.
    pub waiting: VecDeque<Request>,
    /// In the cache, by arrival.
    pub running: Vec<Request>,
    /// Counters; the times are others' business.
    pub stats: Stats,
}

impl Scheduler {
    /// No requests yet.
    pub fn new(max_rows: usize, step_tokens: usize, blocks: u32) -> Self {
        Self {
            max_rows,
            step_tokens,
            blocks: Blocks::new(blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Rows in all.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Rows that requests could still take at once.
    pub fn free_rows(&self) -> usize {
        let taken: usize = self.running.iter().chain(&self.waiting).map(Request::width).sum();
        self.max_rows.saturating_sub(taken)
    }

    /// The next step. What enters has its blocks.
    pub fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        self.plan_decoding(&mut plan);
        let mut budget = self.step_tokens.saturating_sub(plan.entries.len()).max(1);
        if self.plan_prompts(&mut plan, &mut budget) {
            self.admit(&mut plan, &mut budget);
        }
        plan
    }

    /// A running request, by its arrival.
    pub fn running(&mut self, arrival: u64) -> Option<&mut Request> {
        let index = self.running.binary_search_by_key(&arrival, |request| request.arrival).ok()?;
        self.running.get_mut(index)
    }

    /// Notes that the step has been computed.
    pub fn advance(&mut self, plan: &Plan) {
        for entry in &plan.entries {
            let counter = if entry.is_prompt { &mut self.stats.prefill_tokens } else { &mut self.stats.decode_tokens };
            *counter += entry.count as u64;
            let Ok(at) = self.running.binary_search_by_key(&entry.arrival, |request| request.arrival) else { continue };
            let branch = &mut self.running[at].branches[entry.branch];
            branch.computed += entry.count;
            if let Some(table) = &mut branch.table {
                self.blocks.seal(table, &branch.tokens, branch.computed);
            }
        }
    }

    /// Takes a request out and its blocks back.
    pub fn remove(&mut self, id: u64) -> Option<Request> {
        if let Some(index) = self.waiting.iter().position(|request| request.id == id) {
            return self.waiting.remove(index);
        }
        self.running.iter().position(|request| request.id == id).map(|index| self.remove_running(index))
    }

    /// Takes the running request at `index` out and its blocks back.
    pub fn remove_running(&mut self, index: usize) -> Request {
        let mut request = self.running.remove(index);
        request.branches.iter_mut().for_each(|branch| release(&mut self.blocks, branch));
        request
    }

    /// One token of every sequence that has its others in the cache.
    fn plan_decoding(&mut self, plan: &mut Plan) {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_decoding() && self.make_room(index, plan) {
                let request = &self.running[index];
                let (arrival, is_prompt) = (request.arrival, request.generated() == 0);
                let entry = |branch| Entry { arrival, branch, count: 1, is_prompt };
                plan.entries.extend((0..request.branches.len()).map(entry));
            }
            index += 1;
        }
    }

    /// Gives every sequence of a request a block of its own for its next token, at the cost of newer requests; `false`
    /// where it was the newest and had to go itself.
    fn make_room(&mut self, index: usize, plan: &mut Plan) -> bool {
        for branch in 0..self.running[index].branches.len() {
            while !self.extend(index, branch, plan) {
                let newest = self.running.len() - 1;
                self.put_back(newest, plan);
                if newest == index {
                    return false;
                }
            }
        }
        true
    }

    /// Gives a sequence a block of its own for its next token; `false` where none is left.
    fn extend(&mut self, index: usize, branch: usize, plan: &mut Plan) -> bool {
        let branch = &mut self.running[index].branches[branch];
        let at = branch.computed / BLOCK_TOKENS;
        let Some(table) = &mut branch.table else { return false };
        let shared = table.blocks.get(at).copied();
        if shared.is_some_and(|block| !self.blocks.is_shared(block)) {
            return true;
        }
        let Some(own) = self.blocks.take() else { return false };
        match shared {
            Some(block) => {
                plan.copies.push((block, own));
                self.blocks.give_up(block);
                table.blocks[at] = own;
            }
            None => table.blocks.push(own),
        }
        true
    }

    /// Tokens of the prompts that are on their way in; `false` where one of them is short of blocks, so that no other
    /// request may begin.
    fn plan_prompts(&mut self, plan: &mut Plan, budget: &mut usize) -> bool {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            if !self.running[index].is_decoding() {
                for branch in 0..self.running[index].branches.len() {
                    match self.enter_branch(index, branch, plan) {
                        Entrance::Entered => self.plan_branch(index, branch, plan, budget),
                        Entrance::IsComing => {}
                        Entrance::IsFull => return false,
                    }
                }
            }
            index += 1;
        }
        true
    }

    /// Lets a sequence of a running request into the cache, at the cost of newer requests.
    fn enter_branch(&mut self, index: usize, branch: usize, plan: &mut Plan) -> Entrance {
        loop {
            let entering = &mut self.running[index].branches[branch];
            if entering.table.is_some() {
                return Entrance::Entered;
            }
            match enter(&mut self.blocks, entering, 0) {
                Entrance::IsFull if index + 1 < self.running.len() => self.put_back(self.running.len() - 1, plan),
                came => return came,
            }
        }
    }

    fn plan_branch(&self, index: usize, branch: usize, plan: &mut Plan, budget: &mut usize) {
        let request = &self.running[index];
        let count = (request.prefill_end(branch) - request.branches[branch].computed).min(*budget);
        if count > 0 {
            plan.entries.push(Entry { arrival: request.arrival, branch, count, is_prompt: true });
            *budget -= count;
        }
    }

    /// Lets waiting requests in while there are places, tokens and blocks.
    fn admit(&mut self, plan: &mut Plan, budget: &mut usize) {
        let mut rows: usize = self.running.iter().map(Request::width).sum();
        let mut index = 0;
        // No more are looked at than could wait for one another's prompt.
        while *budget > 0 && index < self.waiting.len().min(self.max_rows) {
            if rows + self.waiting[index].width() > self.max_rows {
                return;
            }
            // Every row in the cache will soon want another block; who entered without would be put back at once.
            let spare = self.running.len();
            match enter(&mut self.blocks, &mut self.waiting[index].branches[0], spare) {
                Entrance::IsFull => return,
                Entrance::IsComing => index += 1,
                Entrance::Entered => {
                    let Some(mut request) = self.waiting.remove(index) else { return };
                    rows += request.width();
                    if !request.was_entered {
                        self.stats.shared_tokens += request.branches[0].computed as u64;
                        request.was_entered = true;
                    }
                    let at = self.running.partition_point(|running| running.arrival < request.arrival);
                    self.running.insert(at, request);
                    self.plan_branch(at, 0, plan, budget);
                }
            }
        }
    }

    /// Puts a running request back among the waiting; what it has so far it computes again later.
    fn put_back(&mut self, index: usize, plan: &mut Plan) {
        let mut request = self.running.remove(index);
        plan.entries.retain(|entry| entry.arrival != request.arrival);
        request.branches.iter_mut().for_each(|branch| release(&mut self.blocks, branch));
        let at = self.waiting.partition_point(|waiting| waiting.arrival < request.arrival);
        self.waiting.insert(at, request);
        self.stats.preemptions += 1;
    }
}

/// Lets a sequence into the cache if `spare` blocks are left then; what the cache holds of it counts as computed.
fn enter(blocks: &mut Blocks, branch: &mut Branch, spare: usize) -> Entrance {
    let found = blocks.find(&branch.tokens);
    if found.is_coming {
        return Entrance::IsComing;
    }
    if blocks.cost(branch.tokens.len(), &found) + spare > blocks.available() {
        return Entrance::IsFull;
    }
    branch.computed = found.blocks.len() * BLOCK_TOKENS;
    branch.table = blocks.enter(&branch.tokens, found);
    Entrance::Entered
}

/// Takes a sequence's blocks back.
pub fn release(blocks: &mut Blocks, branch: &mut Branch) {
    branch.computed = 0;
    if let Some(table) = branch.table.take() {
        blocks.leave(table, &branch.tokens);
    }
}
