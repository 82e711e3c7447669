//! Blocks are found, waited for, kept and dropped as they should, and none is lost.

use super::{BLOCK_TOKENS, Blocks, Table};
use crate::generate::random::uniform;

fn tokens(blocks: &[u32], rest: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> = blocks.iter().flat_map(|block| vec![*block; BLOCK_TOKENS]).collect();
    tokens.extend(vec![9; rest]);
    tokens
}

fn enter(blocks: &mut Blocks, tokens: &[u32]) -> Table {
    let found = blocks.find(tokens);
    blocks.enter(tokens, found).unwrap()
}

fn computed(blocks: &mut Blocks, tokens: &[u32]) -> Table {
    let mut table = enter(blocks, tokens);
    blocks.seal(&mut table, tokens, tokens.len());
    table
}

#[test]
fn a_computed_prefix_is_found_and_one_that_is_coming_is_waited_for() {
    let mut blocks = Blocks::new(8);
    let (first, second) = (tokens(&[1, 2], 3), tokens(&[1, 2], 5));
    let mut table = enter(&mut blocks, &first);
    let found = blocks.find(&second);
    assert!(found.is_coming && found.blocks.is_empty());
    blocks.seal(&mut table, &first, BLOCK_TOKENS + 4);
    let found = blocks.find(&second);
    assert!(found.is_coming && found.blocks == table.blocks[..1]);
    blocks.seal(&mut table, &first, first.len());
    let found = blocks.find(&second);
    assert!(!found.is_coming && found.blocks == table.blocks[..2]);
    assert_eq!(blocks.cost(second.len(), &found), 1);
    let other = blocks.enter(&second, found).unwrap();
    assert!(blocks.is_shared(table.blocks[0]) && !blocks.is_shared(table.blocks[2]));
    assert_eq!(blocks.available(), 4);
    blocks.leave(table, &first);
    blocks.leave(other, &second);
    assert_eq!((blocks.available(), blocks.kept()), (8, 2));
}

#[test]
fn the_same_tokens_after_another_start_are_another_content() {
    let mut blocks = Blocks::new(8);
    let first = computed(&mut blocks, &tokens(&[1, 2], 1));
    assert!(blocks.find(&tokens(&[3, 2], 1)).blocks.is_empty());
    assert_eq!(blocks.find(&tokens(&[1, 3], 1)).blocks, first.blocks[..1]);
}

#[test]
fn the_last_token_is_never_found_since_its_logits_are_wanted() {
    let mut blocks = Blocks::new(8);
    let table = computed(&mut blocks, &tokens(&[1, 2], 0));
    assert_eq!(blocks.find(&tokens(&[1, 2], 0)).blocks, table.blocks[..1]);
}

#[test]
fn a_promise_ends_with_the_one_who_gave_it() {
    let mut blocks = Blocks::new(8);
    let prompt = tokens(&[1, 2], 1);
    let table = enter(&mut blocks, &prompt);
    blocks.leave(table, &prompt);
    let found = blocks.find(&prompt);
    assert!(!found.is_coming && found.blocks.is_empty());
    assert!(blocks.contents.is_empty());
}

#[test]
fn a_block_computed_twice_is_held_once() {
    let mut blocks = Blocks::new(8);
    let first = computed(&mut blocks, &tokens(&[1], 4));
    // The second came to the same tokens by writing them one by one.
    let mut second = enter(&mut blocks, &[1]);
    let own = second.blocks[0];
    blocks.seal(&mut second, &tokens(&[1], 0), BLOCK_TOKENS);
    assert_eq!(second.blocks[0], first.blocks[0]);
    assert!(blocks.is_shared(first.blocks[0]) && own != first.blocks[0]);
    assert_eq!(blocks.available(), 6);
}

#[test]
fn the_longest_unused_content_is_dropped_first_and_the_start_of_a_sequence_last() {
    let mut blocks = Blocks::new(4);
    let (old, new) = (tokens(&[1, 2], 0), tokens(&[3, 4], 0));
    for prompt in [&old, &new] {
        let table = computed(&mut blocks, prompt);
        blocks.leave(table, prompt);
    }
    assert_eq!((blocks.available(), blocks.kept()), (4, 4));
    let longer = |prompt: &[u32]| [prompt, &[9]].concat();
    blocks.take().unwrap();
    assert_eq!((blocks.find(&longer(&old)).blocks.len(), blocks.find(&longer(&new)).blocks.len()), (1, 2));
    blocks.take().unwrap();
    assert_eq!((blocks.find(&longer(&old)).blocks.len(), blocks.find(&longer(&new)).blocks.len()), (0, 2));
    blocks.take().unwrap();
    assert_eq!(blocks.find(&longer(&new)).blocks.len(), 1);
}

#[test]
fn nothing_is_done_where_blocks_are_short() {
    let mut blocks = Blocks::new(3);
    let prompt = tokens(&[1], 1);
    let table = computed(&mut blocks, &prompt);
    let longer = tokens(&[1, 2, 3], 0);
    let found = blocks.find(&longer);
    assert_eq!(blocks.cost(longer.len(), &found), 2);
    assert!(blocks.enter(&longer, found).is_none());
    assert_eq!(blocks.available(), 1);
    blocks.leave(table, &prompt);
}

#[test]
fn random_use_loses_no_block_and_leaves_no_promise() {
    const BLOCKS: u32 = 12;
    let mut blocks = Blocks::new(BLOCKS);
    let mut position = 0;
    let mut random = |below: usize| {
        position += 1;
        (uniform(3, position) * below as f64) as usize
    };
    let mut held: Vec<(Table, Vec<u32>, usize)> = Vec::new();
    for _ in 0..20_000 {
        match random(4) {
            0 => {
                let contents: Vec<u32> = (0..random(4)).map(|_| random(2) as u32).collect();
                let prompt = tokens(&contents, 1 + random(BLOCK_TOKENS - 1));
                let found = blocks.find(&prompt);
                let computed = found.blocks.len() * BLOCK_TOKENS;
                if let Some(table) = blocks.enter(&prompt, found) {
                    held.push((table, prompt, computed));
                }
            }
            1 if !held.is_empty() => {
                let (table, prompt, _) = held.swap_remove(random(held.len()));
                blocks.leave(table, &prompt);
            }
            2 if !held.is_empty() => {
                let (table, prompt, computed) = &held[random(held.len())];
                let copy = (blocks.share(table), prompt.clone(), *computed);
                held.push(copy);
            }
            _ if !held.is_empty() => {
                let at = random(held.len());
                let (table, prompt, computed) = &mut held[at];
                *computed += random(prompt.len() - *computed + 1);
                blocks.seal(table, prompt, *computed);
            }
            _ => {}
        }
        let mut holders = [0; BLOCKS as usize];
        held.iter().flat_map(|(table, ..)| &table.blocks).for_each(|block| holders[*block as usize] += 1);
        for (block, count) in blocks.blocks.iter().zip(holders) {
            assert_eq!(block.holders, count);
        }
        assert_eq!(blocks.available(), holders.iter().filter(|count| **count == 0).count());
    }
    for (table, prompt, _) in held {
        blocks.leave(table, &prompt);
    }
    assert_eq!(blocks.available(), BLOCKS as usize);
    assert_eq!(blocks.contents.len(), blocks.kept());
    assert!(blocks.contents.values().all(|content| content.block.is_some()));
}
