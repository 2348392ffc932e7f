//! `pgctl act` over a fake device: every order is understood, carried out, and answered in one line.

#[path = "../../lib/tests/fake/mod.rs"]
mod fake;

use fake::{Fake, Sabotage};
use peergate_guest::Driver;
use pgctl::actor::{Stage, serve};
use serde_json::Value;

/// Gives the orders and takes the answers, the first of which says that the actor is ready.
fn act(sabotage: Sabotage, orders: &[&str]) -> Vec<Value> {
    let driver = Fake::new(sabotage);
    let stage = Stage { driver: &driver as &dyn Driver, act_as: None };
    let mut answers = Vec::new();
    serve(stage, &mut orders.join("\n").as_bytes(), &mut answers).expect("the actor ends well");
    let lines: Vec<Value> =
        answers.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    assert_eq!((&lines[0]["order"], &lines[0]["ok"]), (&"ready".into(), &true.into()));
    lines
}

#[test]
fn what_is_held_is_hashed_as_long_as_it_is_the_same() {
    let orders = ["hold 10000 1", "hash", "hold 10000 1", "hold 0x2710 2", "end", "hash"];
    let said = act(Sabotage::None, &orders);
    assert_eq!(said.len(), 6, "after the end nothing is done: {said:#?}");
    assert_eq!(said[1]["gpu"]["hash"], said[2]["gpu"]);
    assert_eq!(said[1]["fpga"]["hash"], said[2]["fpga"]);
    assert_eq!(said[1]["gpu"]["hash"], said[3]["gpu"]["hash"]);
    assert_ne!(said[1]["domain"], said[3]["domain"], "each hold is an open of its own");
    let hashes = [&said[1]["gpu"]["hash"], &said[1]["fpga"]["hash"], &said[4]["gpu"]["hash"], &said[4]["fpga"]["hash"]];
    assert!((1..4).all(|i| !hashes[..i].contains(&hashes[i])), "{hashes:?}");
}

#[test]
fn an_order_that_makes_no_sense_or_comes_too_early_is_refused_and_the_next_one_taken() {
    let orders =
        ["hash", "dance", "hold", "hold x 1", "copies", "copies stop", "flood stop", "recover", "", "latency 3"];
    let said = act(Sabotage::None, &orders);
    assert_eq!(said.len(), 1 + orders.len());
    for (order, answer) in orders.iter().zip(&said[1..10]) {
        assert_eq!((&answer["order"], &answer["ok"]), (&(*order).into(), &false.into()), "{answer}");
        assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{answer}");
    }
    assert_eq!((&said[10]["ok"], &said[10]["count"]), (&true.into(), &3.into()));
    assert!(
        said[10]["p50"].as_u64() <= said[10]["p99"].as_u64() && said[10]["p99"].as_u64() <= said[10]["max"].as_u64()
    );
}

#[test]
fn numbers_of_others_are_told_by_how_they_are_refused() {
    let orders = ["forge handle 77", "forge address 0x7fff0000", "forge endpoint 9", "forge domain 1"];
    let said = act(Sabotage::None, &orders);
    assert_eq!(said[1]["answer"], "FREE NOENT, event DOMAIN owner nobody");
    assert_eq!(said[2]["answer"], "FILL FAULT MAPPING at that address, event MAPPING owner nobody");
    let own = act(Sabotage::None, &["hold 4096 1"]);
    let shadow = act(Sabotage::None, &["hold 4096 1", &format!("shadow {}", own[1]["gpu"]["address"])]);
    assert_eq!(shadow[2]["read"], "own bytes");
    let endpoint = said[3]["answer"].as_str().expect("text");
    assert!(endpoint.starts_with("ALLOC NOENT") && endpoint.contains("FILL FAULT DOMAIN"), "{endpoint}");
    assert_eq!(said[4]["ok"], false, "a driver that is right has no such thing");
    let taken = act(Sabotage::FreeOfForeign, &["hold 4096 1", "forge handle 1", "forge handle 2"]);
    assert!(
        taken.iter().any(|said| said["answer"].as_str().is_some_and(|answer| answer.starts_with("FREE OK"))),
        "{taken:#?}"
    );
}

#[test]
fn copies_go_on_until_they_are_stopped_and_a_flood_is_counted() {
    let said = act(Sabotage::None, &["copies start", "copies more 20", "copies stop", "flood start", "flood stop"]);
    assert!(said[1..].iter().all(|answer| answer["ok"] == true), "{said:#?}");
    assert!(said[2]["ended_ok"].as_u64() >= Some(20));
    for key in ["lost", "other", "wrong"] {
        assert_eq!(said[3][key], 0, "{said:#?}");
    }
    assert!(said[5]["requests"]["OK"].as_u64() > Some(0) && said[5]["faults"]["FAULT"].as_u64() > Some(0), "{said:#?}");
    assert!(said[5]["copies"]["OK"].as_u64() > Some(0), "{said:#?}");
}
